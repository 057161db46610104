"""Where the tokens of a text begin and end, in code points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from tokenizers import Tokenizer

_PIECE_CHARS: Final = 16_384
_PIECES_A_BATCH: Final = 16


class TokenSpans:
    """The token boundaries of one text; answers in O(log n) how many tokens a stretch has.

    A token belongs to the stretch in which it begins.
    """

    def __init__(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Keep both arrays: [num_tokens] int64, not decreasing."""
        self.starts = starts
        self.ends = ends

    def __len__(self) -> int:
        return len(self.starts)

    def count(self, start: int, end: int) -> int:
        """Return the number of tokens that begin in ``[start, end)``."""
        return self.first_at(end) - self.first_at(start)

    def first_at(self, offset: int) -> int:
        """Return the index of the first token that begins at ``offset`` or later."""
        return int(np.searchsorted(self.starts, offset, side="left"))

    def offset_after(self, start: int, num_tokens: int) -> int | None:
        """Return where the token after ``num_tokens`` from ``start`` begins; ``None``: no more."""
        index = self.first_at(start) + num_tokens
        return int(self.starts[index]) if index < len(self.starts) else None


def compute_token_spans(tokenizer: Tokenizer, text: str) -> TokenSpans:
    """Tokenize ``text`` in bounded pieces and return the boundaries; linear in its length.

    Pieces end at white space where there is any, so that the count is that of the whole text
    but for a token or two.
    """
    starts: list[NDArray[np.int64]] = []
    ends: list[NDArray[np.int64]] = []
    pieces = list(_pieces(text))
    for at in range(0, len(pieces), _PIECES_A_BATCH):
        batch = pieces[at : at + _PIECES_A_BATCH]
        texts = [text[start:end] for start, end in batch]
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        for (start, _), encoding in zip(batch, encodings, strict=True):
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + start
            starts.append(offsets[:, 0])
            ends.append(offsets[:, 1])
    if not starts:
        return TokenSpans(np.zeros(0, np.int64), np.zeros(0, np.int64))
    return TokenSpans(np.maximum.accumulate(np.concatenate(starts)), np.concatenate(ends))


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    start = 0
    while start < len(text):
        end = min(len(text), start + _PIECE_CHARS)
        if end < len(text):
            cut = max(text.rfind(" ", start + 1, end), text.rfind("\n", start + 1, end))
            end = cut if cut > start else end
        yield start, end
        start = end
