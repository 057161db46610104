"""A tokenizer with its chat template, read without loading torch.

Two Rust tokenizers are kept: one that knows special tokens, for the text of the chat template, and
one that reads them as plain text, for everything else.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from typing import TYPE_CHECKING, Any, Final, Self

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from specrag_inference.prompts.chat_frame import ChatTemplateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

_TEMPLATE_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTokenizer:
    """Encodes template text and content text, and renders the chat template. Immutable.

    Attributes:
        tokenizer_json: text of ``tokenizer.json``.
        tokenizer: reads special tokens in text as such.
        special_ids: ids of special tokens.
        vocab_size: one more than the largest id.
        fingerprint: hex digest; tokenizers with equal ones can exchange token ids.
    """

    def __init__(
        self, tokenizer_json: str, *, chat_template: str, special_tokens: Mapping[str, str]
    ) -> None:
        """Read a tokenizer and compile its template.

        Args:
            tokenizer_json: text of ``tokenizer.json``.
            chat_template: Jinja text.
            special_tokens: ``bos_token`` and the like, by name, for the template.

        Raises:
            ChatTemplateError: the template is no valid Jinja text, or special tokens cannot be
                read as plain text.
        """
        self.tokenizer_json = tokenizer_json
        self.tokenizer = _read_tokenizer(tokenizer_json)
        self._content_tokenizer = _read_tokenizer(tokenizer_json)
        self._content_tokenizer.encode_special_tokens = True
        self._special_tokens = dict(special_tokens)
        self._template = _compile(chat_template)
        added = self.tokenizer.get_added_tokens_decoder()
        special = {id_: token.content for id_, token in added.items() if token.special}
        self.special_ids = frozenset(special)
        self._check_content_is_plain(special.values())
        self.fingerprint = _compute_fingerprint(self.tokenizer, special)
        self.vocab_size = 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values())

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read a model folder: ``tokenizer.json``, ``tokenizer_config.json``, the template.

        Raises:
            ChatTemplateError: a file is missing, or the model has no chat template.
        """
        config_path = folder / "tokenizer_config.json"
        try:
            tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
            config = json.loads(config_path.read_text(encoding="utf-8"))
        except FileNotFoundError as exc:
            raise ChatTemplateError(
                f"no chat tokenizer in {folder}: {exc.filename} is missing"
            ) from exc
        special_tokens = {
            name: _token_text(config[name]) for name in _TEMPLATE_TOKENS if config.get(name)
        }
        return cls(
            tokenizer_json,
            chat_template=_find_template(folder, config),
            special_tokens=special_tokens,
        )

    @classmethod
    def from_transformers(cls, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Take over a loaded transformers tokenizer (a fast one).

        Raises:
            ChatTemplateError: it has no chat template.
        """
        template = tokenizer.chat_template
        if not isinstance(template, str):
            raise ChatTemplateError("the tokenizer has no chat template")
        return cls(
            tokenizer.backend_tokenizer.to_str(),
            chat_template=template,
            special_tokens={
                name: str(getattr(tokenizer, name))
                for name in _TEMPLATE_TOKENS
                if getattr(tokenizer, name, None) is not None
            },
        )

    def _check_content_is_plain(self, names: Iterable[str]) -> None:
        for name in names:
            if not self.special_ids.isdisjoint(self.encode_content(name)):
                raise ChatTemplateError(f"the tokenizer cannot read {name!r} as plain text")

    def encode_template(self, text: str) -> list[int]:
        """Return ids of template text; special tokens in it are special."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_content(self, text: str) -> list[int]:
        """Return ids of content; the names of special tokens in it are plain text."""
        ids: list[int] = self._content_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the chat template's text, ready for the assistant to go on.

        Raises:
            ChatTemplateError: the template refuses these messages.
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._special_tokens
            )
        except jinja2.TemplateError as exc:
            raise ChatTemplateError(f"the chat template fails: {exc}") from exc


def _compute_fingerprint(tokenizer: Tokenizer, special: Mapping[int, str]) -> str:
    """Return a hex digest of the id <-> token map and the special ids.

    Tokenizers that agree in it can exchange token ids. The padded size of a model's vocabulary
    plays no part.
    """
    by_id = sorted((id_, token) for token, id_ in tokenizer.get_vocab().items())
    facts = json.dumps([by_id, sorted(special)], ensure_ascii=True)
    return hashlib.sha256(facts.encode()).hexdigest()


def _read_tokenizer(tokenizer_json: str) -> Tokenizer:
    """Return a tokenizer that neither pads nor truncates, whatever its file says."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _compile(chat_template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(chat_template)
    except jinja2.TemplateError as exc:
        raise ChatTemplateError(f"the chat template is malformed: {exc}") from exc


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(pattern)


def _token_text(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _find_template(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {str(entry["name"]): str(entry["template"]) for entry in found}
        found = named.get("default")
    if not isinstance(found, str):
        raise ChatTemplateError(f"the model in {folder} has no chat template")
    return found
