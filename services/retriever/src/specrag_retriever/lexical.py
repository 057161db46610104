"""What the keyword index reads: normalised text that any analyzer splits into useful words.

Analyzers differ between Milvus servers; what must not differ is done here. NFKC makes ligatures
and full-width letters searchable. Scripts written without spaces are split into characters, so
that a question finds a word inside a longer run. Questions lose their function words, which would
otherwise score high in small collections.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_UNSPACED: Final = re.compile(
    "([\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\U00020000-\U0003134f])"
)
_WORD: Final = re.compile(r"\w+")
_FUNCTION_WORDS: Final = frozenset(
    {
        "a", "about", "am", "an", "and", "are", "as", "at", "be", "been", "by", "can", "could",
        "did", "do", "does", "for", "from", "had", "has", "have", "how", "i", "in", "is", "it",
        "its", "may", "me", "my", "of", "on", "or", "our", "please", "shall", "should", "so",
        "tell", "than", "that", "the", "their", "there", "these", "they", "this", "those", "to",
        "us", "was", "we", "were", "what", "when", "where", "which", "who", "whom", "whose",
        "why", "will", "with", "would", "you", "your",
    }
)  # fmt: skip


def lexical_text(text: str) -> str:
    """Return the text as the keyword index stores it."""
    normal = unicodedata.normalize("NFKC", text)
    return " ".join(_UNSPACED.sub(r" \1 ", normal).split())


def lexical_query(query: str) -> str:
    """Return the words of a query worth looking up; all of them if none is left otherwise."""
    words = _WORD.findall(lexical_text(query).casefold())
    kept = [word for word in words if word not in _FUNCTION_WORDS]
    return " ".join(kept or words)
