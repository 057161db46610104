"""The round machine: who is asked, how long is waited, what is verified."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from specrag_common.speculation.acceptance import AcceptanceHistory, RoundOutcome
from specrag_common.speculation.joint_history import FIRST_PAUSE, JointHistory
from specrag_common.speculation.proposals import DraftBranch, DraftProposal, DraftSource
from specrag_common.speculation.step_costs import StepCosts
from specrag_common.speculation.token_tree import ROOT, TokenTree
from specrag_common.wire.proposals import KeyedProposal
from specrag_common.wire.rounds import PrefixHash
from specrag_common.wire.verified import AnswerEnd, VerifiedTokens
from specrag_orchestrator.answering.asking import Asking
from specrag_orchestrator.answering.draft_lines import DraftLine
from specrag_orchestrator.answering.outcomes import collect_branches
from specrag_orchestrator.answering.round_messages import (
    DraftCall,
    RoundLimits,
    RoundStep,
    VerifyCall,
)
from specrag_orchestrator.answering.rounds import RoundMachine, RoundMismatchError
from specrag_orchestrator.answering.stats import DrafterTally
from specrag_orchestrator.answering.waiting import WaitBounds

WAITS = WaitBounds(first_s=0.05, min_s=0.01, max_s=0.5)


def make(num_drafters: int = 2, **limits: int) -> RoundMachine:
    limits.setdefault("max_tokens", 100)
    lines = [line(index) for index in range(num_drafters)]
    return RoundMachine("answer", lines, RoundLimits(waits=WAITS, **limits))


def line(index: int) -> DraftLine:
    return DraftLine(index=index, tally=DrafterTally(drafter_index=index, address=f"d{index}"))


def propose(call: DraftCall, *branches: tuple[int, ...]) -> KeyedProposal:
    proposal = DraftProposal(
        drafter_index=call.drafter_index,
        committed_length=call.key.committed_length,
        branches=tuple(
            DraftBranch(token_ids=ids, laws=(None,) * len(ids), source=DraftSource.SUFFIX)
            for ids in branches
        ),
        gamma=call.gamma,
    )
    return KeyedProposal(key=call.key, proposal=proposal, draft_time_us=100)


def verified(
    call: VerifyCall,
    *token_ids: int,
    num_accepted: int = 0,
    end: AnswerEnd | None = None,
    is_last: bool = True,
) -> VerifiedTokens:
    return VerifiedTokens(
        key=call.key,
        token_ids=token_ids,
        logprobs=(0.0,) * len(token_ids),
        accepted_node_idx=tuple(range(num_accepted)),
        has_bonus=False,
        end=end,
        stop_text_length=None,
        forward_time_us=40_000,
        is_last_of_round=is_last,
    )


def get_call(step: RoundStep) -> VerifyCall:
    assert step.verify_call is not None, "the target is asked"
    return step.verify_call


def run_round_0(machine: RoundMachine, *branches: tuple[int, ...]) -> VerifyCall:
    """Let every drafter propose its branch in the first round."""
    step = machine.begin(0.0)
    last = RoundStep()
    for call, branch in zip(step.draft_calls, branches, strict=True):
        last = machine.on_proposal(propose(call, branch), 0.001)
    return get_call(last)


def test_first_round_asks_every_drafter_and_waits_for_the_prefill() -> None:
    machine = make()
    step = machine.begin(10.0)
    assert [call.drafter_index for call in step.draft_calls] == [0, 1]
    assert all(3 <= call.gamma <= 8 for call in step.draft_calls)
    assert step.verify_call is None
    assert machine.wait_until is None
    machine.on_prefilled(12.0)
    assert machine.wait_until == pytest.approx(12.0 + StepCosts().plain_pass_s), "one pass"


def test_round_closes_as_soon_as_all_have_answered_even_before_the_prefill() -> None:
    machine = make()
    first, second = machine.begin(0.0).draft_calls
    step = machine.on_proposal(propose(first, (1, 2)), 0.1)
    assert step.verify_call is None
    assert step.speculation == (1, 2), "optimistic text while the target reads"
    call = get_call(machine.on_proposal(propose(second, (1, 3)), 0.2))
    assert call.tree.token_ids.tolist() == [1, 2, 3]
    assert call.free_run_tokens == 0
    assert machine.wait_until is None


def test_late_proposal_is_left_out_counted_and_frees_its_drafter() -> None:
    machine = make()
    first, second = machine.begin(0.0).draft_calls
    machine.on_prefilled(0.0)
    machine.on_proposal(propose(first, (1, 2)), 0.01)
    call = get_call(machine.on_wait_over())
    assert call.tree.token_ids.tolist() == [1, 2]
    step = machine.on_verified(verified(call, 1, 9, num_accepted=1), 0.1)
    assert [one.drafter_index for one in step.draft_calls] == [0], "the other one still owes"
    assert machine.owing_drafters in ([1, 0], [0, 1])
    assert machine.on_proposal(propose(second, (5, 5)), 0.101) == RoundStep()
    call = get_call(machine.on_proposal(propose(step.draft_calls[0], (9,)), 0.102))
    step = machine.on_verified(verified(call, 9, 4, num_accepted=1), 0.144)
    calls = {one.drafter_index: one for one in step.draft_calls}
    assert calls[0].committed_token_ids == (9, 4)
    assert calls[1].committed_token_ids == (1, 9, 9, 4), "everything since it was last told"
    assert calls[1].key.committed_length == 4
    assert calls[1].key.prefix_hash == PrefixHash([1, 9, 9, 4]).value


def test_wait_is_fixed_from_history_and_bounded() -> None:
    machine = make(1)
    call = run_round_0(machine, (1,))
    step = machine.on_verified(verified(call, 7), 1.0)
    assert machine.wait_until == pytest.approx(1.0 + WAITS.max_s), "no history yet"
    call = get_call(machine.on_proposal(propose(step.draft_calls[0], (1,)), 1.004))
    machine.on_verified(verified(call, 7), 2.0)
    assert machine.wait_until == pytest.approx(2.0 + 0.004 + 4 * 0.002)


def test_lost_drafter_is_not_waited_for_and_not_asked_again() -> None:
    machine = make()
    first, _ = machine.begin(0.0).draft_calls
    machine.on_proposal(propose(first, (1,)), 0.1)
    call = get_call(machine.on_drafter_lost(1))
    assert machine.live_drafters == [0]
    step = machine.on_verified(verified(call, 1, 2, num_accepted=1), 0.2)
    assert [one.drafter_index for one in step.draft_calls] == [0]


def test_proposal_of_a_drafter_that_is_lost_afterwards_still_counts() -> None:
    machine = make()
    first, _ = machine.begin(0.0).draft_calls
    machine.on_proposal(propose(first, (1,)), 0.1)
    assert machine.on_drafter_lost(0).verify_call is None
    assert get_call(machine.on_drafter_lost(1)).tree.token_ids.tolist() == [1]


def test_without_drafters_the_target_decodes_the_rest_alone() -> None:
    machine = make(0, max_tokens=50)
    call = get_call(machine.begin(0.0))
    assert (call.tree.num_nodes, call.free_run_tokens) == (0, 49)


def test_all_lost_in_mid_answer_means_one_free_run_for_the_rest() -> None:
    machine = make(1, max_tokens=50)
    call = run_round_0(machine, (1, 2))
    machine.on_drafter_lost(0)
    step = machine.on_verified(verified(call, 1, 2, 3, num_accepted=2), 0.1)
    assert get_call(step).free_run_tokens == 46


def useless_history() -> AcceptanceHistory:
    history = AcceptanceHistory.begin()
    for _ in range(50):
        history = history.observe(RoundOutcome(gamma=4, accepted_by_rank=(0,), nodes_by_rank=(4,)))
    return history


def test_drafter_that_does_not_pay_is_left_alone_for_pauses_that_double() -> None:
    drafter = line(0)
    drafter.history = useless_history()
    machine = RoundMachine("answer", [drafter], RoundLimits(max_tokens=4000, waits=WAITS))
    step = machine.begin(0.0)
    pauses = []
    for _ in range(9):
        if step.draft_calls:
            step = machine.on_proposal(propose(step.draft_calls[0], (1, 2)), 0.0)
        call = get_call(step)
        if not call.tree.num_nodes:
            pauses.append(1 + call.free_run_tokens)
        step = decode(machine, call, 1 + call.free_run_tokens, 0.0)
    assert pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE]


def decode(machine: RoundMachine, call: VerifyCall, num_tokens: int, now: float) -> RoundStep:
    """Have the target decode tokens that no draft foresaw."""
    step = RoundStep()
    for idx in range(num_tokens):
        step = machine.on_verified(verified(call, 9, is_last=idx == num_tokens - 1), now)
    return step


def test_probe_tells_what_was_decoded_alone_and_success_ends_the_pauses() -> None:
    drafter = line(0)
    drafter.history = useless_history()
    machine = RoundMachine(
        "answer",
        [drafter],
        RoundLimits(max_tokens=4000, waits=WAITS),
        joint=JointHistory(pause=32),
    )
    first = machine.begin(0.0)
    call = get_call(machine.on_proposal(propose(first.draft_calls[0], (1,)), 0.0))
    call = get_call(decode(machine, call, 1, 0.0))
    assert call.free_run_tokens == 31
    (probe,) = decode(machine, call, 32, 0.1).draft_calls
    assert probe.committed_token_ids == (9,) * 33
    call = get_call(machine.on_proposal(propose(probe, (1, 2, 3)), 0.2))
    machine.on_verified(verified(call, 1, 2, 3, 4, num_accepted=3), 0.3)
    assert machine.joint.pause == FIRST_PAUSE


def test_free_run_ends_with_the_answer() -> None:
    drafter = line(0)
    drafter.history = useless_history()
    machine = RoundMachine("answer", [drafter], RoundLimits(max_tokens=5, waits=WAITS))
    first = machine.begin(0.0)
    call = get_call(machine.on_proposal(propose(first.draft_calls[0], (1,)), 0.0))
    step = machine.on_verified(verified(call, 9), 0.1)
    assert get_call(step).free_run_tokens == 3, "one token is left behind those"


def test_first_round_asks_nobody_where_passes_are_full_and_drafts_do_not_help() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.observe_pass(num_tokens=32, num_sequences=32, seconds=0.06)
        costs.observe_pass(num_tokens=64, num_sequences=32, seconds=0.10)
    drafter = line(0)
    drafter.history = useless_history()
    limits = RoundLimits(max_tokens=100, waits=WAITS)
    machine = RoundMachine("answer", [drafter], limits, step_costs=costs)
    assert get_call(machine.begin(0.0)).free_run_tokens >= FIRST_PAUSE - 1


def test_messages_of_a_free_run_belong_to_one_round() -> None:
    machine = make(0, max_tokens=50)
    call = get_call(machine.begin(0.0))
    step = machine.on_verified(verified(call, 1, is_last=False), 0.1)
    assert step == RoundStep(verified_tree=step.verified_tree)
    assert machine.on_verified(verified(call, 2, is_last=False), 0.2) == RoundStep()
    machine.on_verified(verified(call, 3, end=AnswerEnd.STOP), 0.3)
    assert machine.is_done


def test_drafts_never_reach_beyond_the_token_limit() -> None:
    machine = make(1, max_tokens=4)
    assert machine.begin(0.0).draft_calls[0].gamma == 3
    machine = make(1, max_tokens=1)
    call = get_call(machine.begin(0.0))
    assert (call.tree.num_nodes, call.free_run_tokens) == (0, 0)


def test_budget_is_counted_in_proposed_tokens() -> None:
    machine = make(2, max_draft_tokens=6)
    call = run_round_0(machine, (1, 2, 3, 4, 5), (1, 2, 3, 4, 5))
    assert len(call.tree.proposals) == 6
    assert call.tree.num_nodes == 3


def test_acceptance_is_learned_from_what_the_target_saw() -> None:
    machine = make(2)
    call = run_round_0(machine, (1, 2, 3), (9, 9, 9))
    step = machine.on_verified(verified(call, 1, 2, 3, 4, num_accepted=3), 0.1)
    gammas = {one.drafter_index: one.gamma for one in step.draft_calls}
    assert gammas[0] >= gammas[1]


def test_speculation_follows_the_drafter_accepted_most() -> None:
    machine = make(2)
    call = run_round_0(machine, (9, 9, 9), (1, 2, 3))
    step = machine.on_verified(verified(call, 1, 2, 3, 4, num_accepted=3), 0.1)
    first, second = step.draft_calls
    machine.on_proposal(propose(first, (7, 7)), 0.2)
    step = machine.on_proposal(propose(second, (8, 8)), 0.2)
    assert step.speculation == (8, 8)


def test_answer_to_another_round_is_a_mismatch() -> None:
    machine = make(0)
    call = get_call(machine.begin(0.0))
    machine.on_verified(verified(call, 1), 0.1)
    with pytest.raises(RoundMismatchError):
        machine.on_verified(verified(call, 2), 0.2)


def test_branches_are_collected_as_the_budget_cut_them() -> None:
    machine = make(2, max_draft_tokens=5)
    call = run_round_0(machine, (1, 2, 3), (1, 5, 6))
    assert collect_branches(call.tree) == {0: {0: (1, 2, 3)}, 1: {0: (1, 5)}}


@dataclass
class Simulation:
    """Random drafters, random delays, random losses against a fixed script."""

    seed: int
    script: list[int] = field(default_factory=list)

    def run(self) -> tuple[list[int], int]:
        rng = random.Random(self.seed)
        script = self.script = [rng.randrange(5) for _ in range(60)]
        machine = make(rng.randint(0, 4), max_tokens=len(script), max_draft_tokens=20)
        committed: list[int] = []
        told: dict[int, list[int]] = {index: [] for index in range(4)}
        pending: list[DraftCall] = []
        now, num_steps = 0.0, 0
        step = machine.begin(now)
        while True:
            num_steps += 1
            now += rng.random() * 0.02
            for call in step.draft_calls:
                told[call.drafter_index] += call.committed_token_ids
                assert told[call.drafter_index] == committed, "drafters know what is committed"
                assert call.drafter_index not in [one.drafter_index for one in pending]
                pending.append(call)
            if step.verify_call is not None:
                tokens = walk(step.verify_call.tree, script[len(committed) :])
                committed += tokens
                end = AnswerEnd.LENGTH if len(committed) == len(script) else None
                step = machine.on_verified(
                    verified(step.verify_call, *tokens, num_accepted=len(tokens) - 1, end=end), now
                )
                if machine.is_done:
                    return committed, num_steps
                continue
            step = self.next_step(machine, pending, rng, now)

    def next_step(
        self, machine: RoundMachine, pending: list[DraftCall], rng: random.Random, now: float
    ) -> RoundStep:
        machine.on_prefilled(now)
        if not pending or rng.random() < 0.2:
            return machine.on_wait_over()
        call = pending.pop(rng.randrange(len(pending)))
        if rng.random() < 0.03:
            return machine.on_drafter_lost(call.drafter_index)
        begin = call.key.committed_length
        right = self.script[begin : begin + rng.randint(0, call.gamma)]
        branch = (*right, *([9] if len(right) < call.gamma else []))
        return machine.on_proposal(propose(call, *([branch] if branch else [])), now)


def walk(tree: TokenTree, script: list[int]) -> list[int]:
    """Accept along the script, then take its next token, as a target would."""
    tokens: list[int] = []
    node = ROOT
    for token_id in script:
        tokens.append(token_id)
        children = [
            idx
            for idx in range(tree.num_nodes)
            if tree.parent_idx[idx] == node and tree.token_ids[idx] == token_id
        ]
        if not children:
            break
        node = children[0]
    return tokens


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_events_commits_the_script_and_ends(seed: int) -> None:
    simulation = Simulation(seed)
    committed, num_steps = simulation.run()
    assert committed == simulation.script
    assert num_steps < 2000


def test_full_passes_turn_drafting_down_to_nothing() -> None:
    def count_drafted(num_sequences: int) -> int:
        costs = StepCosts()
        rng = random.Random(1)
        for _ in range(100):  # other answers: a pass that costs what is in it
            num_tokens = num_sequences * rng.randint(1, 6)
            costs.observe_pass(
                num_tokens=num_tokens,
                num_sequences=num_sequences,
                seconds=0.02 + 0.001 * num_tokens,
            )
        drafters = [line(0), line(1)]
        for one in drafters:
            one.history = useless_history().fade(1000)
            for accepted in (1, 0, 2, 0, 1, 0, 1, 3) * 4:
                one.observe(
                    RoundOutcome(gamma=4, accepted_by_rank=(accepted,), nodes_by_rank=(4,)),
                    num_tokens=1,
                )
        asking = Asking(costs, RoundLimits(max_tokens=500, waits=WAITS), JointHistory())
        plan = asking.choose(drafters, round_number=1, num_left=400).plan
        return sum(ask.gamma for ask in plan.asks.values())

    drafted = [count_drafted(size) for size in (1, 4, 64)]
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] > 2
    assert drafted[-1] == 0
