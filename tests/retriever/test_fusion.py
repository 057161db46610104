from __future__ import annotations

from specrag_retriever.fusion import RRF_CONSTANT, WindowHit, fuse


def hits(*scored: tuple[str, float]) -> list[WindowHit]:
    return [WindowHit(row_id=name, score=score, fields={"name": name}) for name, score in scored]


def order(dense: list[WindowHit], lexical: list[WindowHit]) -> list[str]:
    return [hit.row_id for hit in fuse(dense, lexical)]


def test_scores_are_sums_of_reciprocal_ranks() -> None:
    fused = fuse(hits(("a", 0.9), ("b", 0.8)), hits(("b", 5.0), ("c", 4.0)))
    assert [(hit.row_id, hit.score) for hit in fused] == [
        ("b", 1 / (RRF_CONSTANT + 2) + 1 / (RRF_CONSTANT + 1)),
        ("a", 1 / (RRF_CONSTANT + 1)),
        ("c", 1 / (RRF_CONSTANT + 2)),
    ]


def test_keyword_tail_does_not_bury_the_one_rare_word() -> None:
    dense = hits(*((f"common{index}", 0.5) for index in range(30)))
    tail = hits(*((f"common{29 - index}", 1.0) for index in range(30)))
    fused = order(dense, hits(("rare", 10.0)) + tail)
    assert fused.index("rare") <= 1


def test_one_empty_list_keeps_the_order_of_the_other() -> None:
    assert order(hits(("a", 0.9), ("b", 0.1)), []) == ["a", "b"]
    assert order([], hits(("a", 9.0), ("b", 8.0))) == ["a", "b"]
    assert order([], []) == []
