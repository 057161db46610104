"""The plan of one pass: budgets, order, chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from specrag_inference.scheduler import Candidate, Grant, SchedulerLimits, plan_step

LIMITS = SchedulerLimits(max_step_tokens=64, max_shared_prefill_tokens=16, block_size=4)


def candidate(name: str, num_chain: int, num_nodes: int = 0, **facts: Any) -> Candidate:
    defaults: dict[str, Any] = {
        "order": 0,
        "last_turn": 0,
        "num_positions": 0,
        "num_resident": 0,
        "num_held_blocks": 0,
    }
    return Candidate(
        sequence_id=name, num_chain=num_chain, num_nodes=num_nodes, **{**defaults, **facts}
    )


def plan(*candidates: Candidate, num_free_blocks: int = 1000) -> dict[str, Grant]:
    grants = plan_step(candidates, num_free_blocks=num_free_blocks, limits=LIMITS)
    assert len({grant.sequence_id for grant in grants}) == len(grants)
    return {grant.sequence_id: grant for grant in grants}


def test_prefill_alone_fills_the_pass_in_chunks() -> None:
    grants = plan(candidate("a", 100))
    assert grants["a"] == Grant("a", 64, 0, ends_chain=False)


def test_prefill_beside_a_running_sequence_gets_the_small_chunk() -> None:
    grants = plan(candidate("long", 100), candidate("tree", 1, 8))
    assert grants["tree"].ends_chain
    assert grants["long"].num_chain == 16


def test_end_of_a_long_chain_is_computed_together_with_its_nodes() -> None:
    grants = plan(candidate("a", 60, 10))
    assert grants["a"] == Grant("a", 59, 0, ends_chain=False)
    grants = plan(candidate("a", 20, 10))
    assert grants["a"] == Grant("a", 20, 10, ends_chain=True)


def test_oldest_prefill_goes_first_and_the_rest_of_the_budget_to_the_next() -> None:
    grants = plan(candidate("young", 50, order=2), candidate("old", 40, order=1))
    assert grants["old"].ends_chain
    assert grants["young"].num_chain == 24


def test_sequence_served_longest_ago_goes_first_when_the_pass_is_full() -> None:
    crowd = [candidate(f"s{i}", 1, 14, last_turn=9 - i) for i in range(10)]
    assert set(plan(*crowd)) == {"s9", "s8", "s7", "s6"}


def test_sequence_without_blocks_is_passed_over_for_one_that_fits() -> None:
    grants = plan(
        candidate("poor", 1, num_positions=8, num_held_blocks=2),
        candidate("rich", 1, num_positions=7, num_held_blocks=2),
        num_free_blocks=0,
    )
    assert set(grants) == {"rich"}


def test_blocks_to_be_copied_before_writing_count() -> None:
    sharing = candidate("a", 1, num_positions=6, num_held_blocks=2, num_shared_blocks=1)
    assert plan(sharing, num_free_blocks=0) == {}
    assert set(plan(sharing, num_free_blocks=1)) == {"a"}


def test_nodes_that_can_wait_fill_the_chunk_behind_the_chain() -> None:
    scoring = candidate("score", 1, 50, nodes_can_wait=True)
    grants = plan(scoring, candidate("tree", 1, 8))
    assert grants["score"] == Grant("score", 1, 15, ends_chain=True)
    assert plan(scoring)["score"] == Grant("score", 1, 50, ends_chain=True)
    assert plan(scoring, num_free_blocks=5)["score"] == Grant("score", 1, 19, ends_chain=True)


def test_large_tree_is_served_whole_after_being_passed_over() -> None:
    quick = candidate("quick", 1, 8)
    assert set(plan(quick, candidate("large", 1, 40))) == {"quick"}
    grants = plan(quick, candidate("large", 1, 40, num_passed_over=2))
    assert grants["large"] == Grant("large", 1, 40, ends_chain=True)
    assert grants["quick"].ends_chain


def test_overdue_prefill_goes_before_quick_ones_that_would_fill_the_pass() -> None:
    crowd = [candidate(f"s{i}", 1, 15) for i in range(4)]
    assert "prompt" not in plan(*crowd, candidate("prompt", 100, is_opening=True))
    waited = candidate("prompt", 100, is_opening=True, num_passed_over=2)
    grants = plan(*crowd, waited)
    assert grants["prompt"] == Grant("prompt", 16, 0, ends_chain=False)
    assert len(grants) == 4


def test_overdue_running_sequence_goes_before_older_prompts() -> None:
    old = candidate("prompt", 100, order=1, is_opening=True, num_passed_over=9)
    running = candidate("large", 1, 40, order=2, num_passed_over=2)
    assert set(plan(old, running, candidate("quick", 1))) == {"large", "quick", "prompt"}
    assert plan(old, running, candidate("quick", 1))["prompt"].num_chain < 16 + 1


def test_free_blocks_are_kept_for_the_one_that_was_passed_over_for_want_of_them() -> None:
    needs_two = {"num_positions": 8, "num_held_blocks": 2}
    front = candidate("front", 1, 5, **needs_two)
    behind = candidate("behind", 1, last_turn=1, **needs_two)
    assert set(plan(front, behind, num_free_blocks=1)) == {"behind"}
    front = candidate("front", 1, 5, num_passed_over=2, **needs_two)
    assert plan(front, behind, num_free_blocks=1) == {}
    in_place = candidate("in place", 1, last_turn=1, num_positions=7, num_held_blocks=2)
    assert set(plan(front, in_place, num_free_blocks=1)) == {"in place"}


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    made = []
    for index in range(draw(st.integers(0, 8))):
        positions = draw(st.integers(0, 40))
        made.append(
            candidate(
                f"s{index}",
                draw(st.integers(1, 120)),
                draw(st.integers(0, 40)),
                order=draw(st.integers(0, 9)),
                last_turn=draw(st.integers(0, 9)),
                num_positions=positions,
                num_held_blocks=-(-positions // 4),
                num_passed_over=draw(st.integers(0, 3)),
                nodes_can_wait=draw(st.booleans()),
                is_opening=draw(st.booleans()),
            )
        )
    return made


@given(crowd=candidates(), num_free_blocks=st.integers(0, 60))
def test_plan_stays_within_both_budgets_and_serves_somebody_if_anybody_fits(
    crowd: list[Candidate], num_free_blocks: int
) -> None:
    grants = plan(*crowd, num_free_blocks=num_free_blocks)
    num_tokens = num_blocks = 0
    by_name = {c.sequence_id: c for c in crowd}
    for name, grant in grants.items():
        asked = by_name[name]
        assert 0 < grant.num_chain <= asked.num_chain
        assert grant.ends_chain == (grant.num_chain == asked.num_chain)
        if asked.nodes_can_wait and asked.num_nodes and grant.ends_chain:
            assert 0 < grant.num_nodes <= asked.num_nodes
        else:
            assert grant.num_nodes == (asked.num_nodes if grant.ends_chain else 0)
        num_tokens += grant.num_tokens
        num_blocks += asked.count_blocks(grant.num_tokens, 4)
    assert num_tokens <= 64
    assert num_blocks <= num_free_blocks
    if not any(c.num_passed_over >= 2 for c in crowd) and any(
        c.count_blocks(min(c.num_tokens, 64), 4) <= num_free_blocks for c in crowd
    ):
        assert grants


@given(crowd=candidates())
def test_nobody_who_runs_waits_for_more_than_a_few_passes(crowd: list[Candidate]) -> None:
    passed_over = {c.sequence_id: 0 for c in crowd}
    last_turn = dict.fromkeys(passed_over, 0)
    for step in range(1, 40):
        asking = [
            replace(
                c,
                num_passed_over=passed_over[c.sequence_id],
                last_turn=last_turn[c.sequence_id],
                is_opening=False,
            )
            for c in crowd
        ]
        grants = plan(*asking)
        for c in crowd:
            served = c.sequence_id in grants
            passed_over[c.sequence_id] = 0 if served else passed_over[c.sequence_id] + 1
            last_turn[c.sequence_id] = step if served else last_turn[c.sequence_id]
        assert max(passed_over.values(), default=0) <= 3 + 2 * len(crowd)
