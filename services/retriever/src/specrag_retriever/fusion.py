"""Two ranked lists to one, by reciprocal rank.

Reciprocal rank fusion looks at ranks only, so a window at the far end of both lists beats one that
a rare word (a part number, a name) puts at the top of the keyword list alone. The keyword list is
therefore cut first, where its scores have fallen to those of windows that share only common words.
That needs scores, which is why fusion happens here and not in the database.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

RRF_CONSTANT: Final = 60
"""Usual constant of reciprocal rank fusion; larger values flatten the ranks."""

MIN_LEXICAL_SHARE: Final = 0.3
"""Keyword hits below this share of the best keyword score are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowHit:
    """A window that was found, with its passage.

    Attributes:
        row_id: identifies the window.
        score: of one list, or fused; higher is better.
        fields: stored fields, named as in ``milvus_schema.PASSAGE_FIELDS``.
    """

    row_id: str
    score: float
    fields: dict[str, Any]


def fuse(dense: Sequence[WindowHit], lexical: Sequence[WindowHit]) -> list[WindowHit]:
    """Return every window of both lists once, best first; ties keep the order of ``dense``.

    Args:
        dense: best first.
        lexical: best first, scores above 0.
    """
    least = MIN_LEXICAL_SHARE * max((hit.score for hit in lexical), default=0.0)
    kept = [hit for hit in lexical if hit.score >= least]
    scores: dict[str, float] = {}
    hits: dict[str, WindowHit] = {}
    for ranked in (dense, kept):
        for rank, hit in enumerate(ranked, start=1):
            hits.setdefault(hit.row_id, hit)
            scores[hit.row_id] = scores.get(hit.row_id, 0.0) + 1.0 / (RRF_CONSTANT + rank)
    order = sorted(hits, key=lambda row_id: -scores[row_id])
    return [
        WindowHit(row_id=row_id, score=scores[row_id], fields=hits[row_id].fields)
        for row_id in order
    ]
