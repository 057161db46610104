"""Search windows: the parts of a passage that the embedder can read at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from specrag_retriever.chunking.token_spans import compute_token_spans

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from specrag_retriever.chunking.passages import TextPassage

OVERLAP_TOKENS: Final = 24
"""Word pieces shared by neighbouring windows, so that no fact is cut in two."""

_MAX_PREFIX_TOKENS: Final = 48
_SPECIAL_TOKENS: Final = 2
_SLACK_TOKENS: Final = 4
"""Kept free: a stretch tokenized alone may count a little more than within the passage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is embedded for a part of a passage.

    Attributes:
        context: title and headings above the window; may be empty.
        text: the part of the passage.
    """

    context: str
    text: str

    @property
    def embedder_text(self) -> str:
        """Return what the embedder reads."""
        return f"{self.context}\n{self.text}" if self.context else self.text


def split_into_windows(
    passage: TextPassage, title: str, tokenizer: Tokenizer, max_tokens: int
) -> list[Window]:
    """Return windows that cover the passage, evenly sized, neighbours overlapping.

    Args:
        passage: what to split.
        title: of the document.
        tokenizer: the embedder's.
        max_tokens: the embedder's longest input, special tokens included.
    """
    context, num_context = _context(passage, title, tokenizer)
    room = max_tokens - _SPECIAL_TOKENS - _SLACK_TOKENS - num_context
    spans = compute_token_spans(tokenizer, passage.text)
    if len(spans) <= room:
        return [Window(context=context, text=passage.text)]
    num_windows = -(-(len(spans) - OVERLAP_TOKENS) // (room - OVERLAP_TOKENS))
    step = (len(spans) - room) / (num_windows - 1)
    windows = []
    for index in range(num_windows):
        first = round(index * step)
        last = min(first + room, len(spans)) - 1
        start = int(spans.starts[first]) if index else 0
        end = int(spans.ends[last]) if index < num_windows - 1 else len(passage.text)
        windows.append(Window(context=context, text=passage.text[start:end]))
    return windows


def _context(passage: TextPassage, title: str, tokenizer: Tokenizer) -> tuple[str, int]:
    names = list(dict.fromkeys(name for name in (title, *passage.headings) if name))
    if names and passage.text.startswith(names[-1]):
        names.pop()
    context = " > ".join(names)
    spans = compute_token_spans(tokenizer, context)
    if len(spans) > _MAX_PREFIX_TOKENS:
        context = context[: int(spans.starts[_MAX_PREFIX_TOKENS])].rstrip()
    return context, min(len(spans), _MAX_PREFIX_TOKENS)
