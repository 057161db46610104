"""What the service needs of an embedding model; ``embedding`` implements it with torch."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Tokenizer


class Urgency(IntEnum):
    """What overtakes what."""

    QUERY = 0
    DOCUMENT = 1


class Embedder(Protocol):
    """Turns texts into unit vectors of one fixed space."""

    @property
    def fingerprint(self) -> str:
        """Identifies the space: vectors with different fingerprints must never be compared."""

    @property
    def dim(self) -> int:
        """Length of the vectors."""

    @property
    def max_window_tokens(self) -> int:
        """Longest input in tokens of :attr:`tokenizer`, special tokens included."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Counts tokens: neither pads nor truncates."""

    async def embed(self, texts: Sequence[str], urgency: Urgency) -> NDArray[np.float32]:
        """Return [num_texts, dim] float32 rows of length 1; longer texts lose their end."""
