"""Structured conversations to token ids: chat template, escaping, fitting.

Three properties hold by construction. *Append-only*: the prompt of turn k + 1 begins with the very
ids of turn k's prompt and answer. *Data stays data*: content is never looked at for special
tokens, so no passage, question or answer can open a chat turn, and a passage can neither close its
block nor pass for another one. *It fits*: what is left out is left out in a fixed order and
reported.
"""

from specrag_inference.prompts.builder import BuiltPrompt, PromptBuilder, PromptTooLongError
from specrag_inference.prompts.chat_frame import ChatTemplateError
from specrag_inference.prompts.chat_tokenizer import ChatTokenizer

__all__ = [
    "BuiltPrompt",
    "ChatTemplateError",
    "ChatTokenizer",
    "PromptBuilder",
    "PromptTooLongError",
]
