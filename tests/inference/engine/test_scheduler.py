"""The plan of one pass: budgets, order, chunks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from specrag_inference.scheduler import Candidate, Grant, SchedulerLimits, plan_step

LIMITS = SchedulerLimits(max_step_tokens=64, max_shared_prefill_tokens=16, block_size=4)


def candidate(name: str, num_chain: int, num_nodes: int = 0, **facts: int) -> Candidate:
    defaults = {
        "order": 0,
        "last_step": 0,
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
    assert grants["a"] == Grant(sequence_id="a", num_chain=64, is_whole=False)


def test_prefill_beside_a_running_sequence_gets_the_small_chunk() -> None:
    grants = plan(candidate("long", 100), candidate("tree", 1, 8))
    assert grants["tree"].is_whole
    assert grants["long"].num_chain == 16


def test_end_of_a_long_chain_is_computed_together_with_its_nodes() -> None:
    grants = plan(candidate("a", 60, 10))
    assert grants["a"] == Grant(sequence_id="a", num_chain=59, is_whole=False)
    grants = plan(candidate("a", 20, 10))
    assert grants["a"] == Grant(sequence_id="a", num_chain=20, is_whole=True)


def test_oldest_prefill_goes_first_and_the_rest_of_the_budget_to_the_next() -> None:
    grants = plan(candidate("young", 50, order=2), candidate("old", 40, order=1))
    assert grants["old"].is_whole
    assert grants["young"].num_chain == 24


def test_sequence_served_longest_ago_goes_first_when_the_pass_is_full() -> None:
    crowd = [candidate(f"s{i}", 1, 14, last_step=9 - i) for i in range(10)]
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
                last_step=draw(st.integers(0, 9)),
                num_positions=positions,
                num_held_blocks=-(-positions // 4),
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
        granted = asked.num_tokens if grant.is_whole else grant.num_chain
        assert 0 < grant.num_chain <= asked.num_chain
        assert grant.is_whole or grant.num_chain < asked.num_chain
        num_tokens += granted
        num_blocks += asked.count_blocks(granted, 4)
    assert num_tokens <= 64
    assert num_blocks <= num_free_blocks
    if any(c.count_blocks(min(c.num_tokens, 64), 4) <= num_free_blocks for c in crowd):
        assert grants
