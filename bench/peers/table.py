"""From single answers to the table and its bars."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.peers.lineup import BF16_PEERS, OUR_MODES, VLLM_MODES
from bench.results import ResultRow, at_least

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from bench.peers.child import Answer

MIN_PREFILL_RATIO = 0.9
MIN_DECODE_RATIO = 0.8
MIN_OVER_GENERATE = 3.0
MIN_JOINT_RATIO = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One answer of one peer."""

    peer: str
    question_id: str
    num_prompt_tokens: int
    answer: Answer

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens over the time to the first token."""
        return self.num_prompt_tokens / self.answer.first_token_s

    def describe(self) -> str:
        """Return one line."""
        answer = self.answer
        return (
            f"{self.question_id:32} {self.peer:12} first {answer.first_token_s:6.2f} s  decode "
            f"{answer.decode_tokens_per_s:6.1f} tokens/s  total {answer.total_s:6.2f} s  "
            f"{len(answer.token_ids)} tokens"
        )


def format_table(measured: Sequence[Measured]) -> str:
    """Return medians of every peer."""
    lines = [f"{'peer':12} {'first, s':>9} {'prefill, tokens/s':>18} {'decode, tokens/s':>24}"]
    lines[0] += f" {'total, s':>9}"
    for peer in _list_peers(measured):
        own = [one for one in measured if one.peer == peer]
        rates = sorted(one.answer.decode_tokens_per_s for one in own)
        lines.append(
            f"{peer:12} {_median(one.answer.first_token_s for one in own):9.2f} "
            f"{_median(one.prefill_tokens_per_s for one in own):18.0f} "
            f"{_median(rates):8.1f} ({rates[0]:5.1f} to {rates[-1]:5.1f}) "
            f"{_median(one.answer.total_s for one in own):9.2f}"
        )
    return "\n".join(lines)


def summarise(measured: Sequence[Measured]) -> tuple[ResultRow, ...]:
    """Return medians, ratios with their bars, and how far the bf16 peers agree."""
    peers = _list_peers(measured)
    rows = []
    for peer in peers:
        own = [one for one in measured if one.peer == peer]
        rows += [
            ResultRow(what=f"{peer}: {name}", value=_median(value(one) for one in own), unit=unit)
            for name, unit, value in _FIGURES
        ]
    return (*rows, *_compare(measured, peers), *_agreement(measured, peers))


def ratio_of_medians(
    measured: Sequence[Measured], peer: str, other: str, value: Callable[[Measured], float]
) -> float:
    """Return the median over prompts of a peer's value over another's on the same prompt."""
    theirs = {one.question_id: value(one) for one in measured if one.peer == other}
    return _median(value(one) / theirs[one.question_id] for one in measured if one.peer == peer)


def _compare(measured: Sequence[Measured], peers: Sequence[str]) -> list[ResultRow]:
    rows = []
    for ours in (peer for peer in OUR_MODES if peer in peers):
        if "vllm" in peers and ours == "ours-alone":
            prefill = ratio_of_medians(measured, ours, "vllm", _get_prefill)
            rows.append(at_least(f"{ours} / vllm: prefill", prefill, MIN_PREFILL_RATIO))
            decode = ratio_of_medians(measured, ours, "vllm", _get_decode)
            rows.append(at_least(f"{ours} / vllm: decode", decode, MIN_DECODE_RATIO))
        if "generate" in peers and ours == "ours-alone":
            decode = ratio_of_medians(measured, ours, "generate", _get_decode)
            rows.append(at_least(f"{ours} / generate: decode", decode, MIN_OVER_GENERATE))
        if ours != "ours-alone":
            rows += _compare_joint(measured, peers, ours)
    return rows


def _compare_joint(
    measured: Sequence[Measured], peers: Sequence[str], ours: str
) -> list[ResultRow]:
    """Return the decode rate against the better of vLLM's modes, and the total against all."""
    rows = []
    rivals = [peer for peer in peers if peer in VLLM_MODES]
    if rivals:
        best = max(rivals, key=lambda peer: _median_of(measured, peer, _get_decode))
        decode = ratio_of_medians(measured, ours, best, _get_decode)
        rows.append(at_least(f"{ours} / {best}: decode", decode, MIN_JOINT_RATIO))
    others = [peer for peer in peers if peer not in OUR_MODES]
    if others:
        fastest = min(others, key=lambda peer: _median_of(measured, peer, _get_total))
        total = ratio_of_medians(measured, fastest, ours, _get_total)
        rows.append(at_least(f"{fastest} / {ours}: total time", total, 1.0))
    return rows


def _agreement(measured: Sequence[Measured], peers: Sequence[str]) -> list[ResultRow]:
    """Return how many leading tokens each bf16 peer shares with the first of them."""
    bf16 = [peer for peer in peers if peer in BF16_PEERS]
    rows = []
    for peer in bf16[1:]:
        reference = {
            one.question_id: one.answer.token_ids for one in measured if one.peer == bf16[0]
        }
        own = {one.question_id: one.answer.token_ids for one in measured if one.peer == peer}
        same = sum(own[key] == reference[key] for key in own)
        leading = _median(_count_leading(own[key], reference[key]) for key in own)
        rows.append(
            ResultRow(
                what=f"{peer}: answers equal to {bf16[0]}'s",
                value=f"{same} of {len(own)}, median {leading:.0f} leading tokens",
            )
        )
    return rows


def _count_leading(token_ids: Sequence[int], others: Sequence[int]) -> int:
    pairs = enumerate(zip(token_ids, others, strict=False))
    return next((idx for idx, (a, b) in pairs if a != b), min(len(token_ids), len(others)))


def _list_peers(measured: Sequence[Measured]) -> list[str]:
    return list(dict.fromkeys(one.peer for one in measured))


def _median_of(
    measured: Sequence[Measured], peer: str, value: Callable[[Measured], float]
) -> float:
    return _median(value(one) for one in measured if one.peer == peer)


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _get_first(measured: Measured) -> float:
    return measured.answer.first_token_s


def _get_prefill(measured: Measured) -> float:
    return measured.prefill_tokens_per_s


def _get_decode(measured: Measured) -> float:
    return measured.answer.decode_tokens_per_s


def _get_total(measured: Measured) -> float:
    return measured.answer.total_s


_FIGURES: tuple[tuple[str, str, Callable[[Measured], float]], ...] = (
    ("first token", "s", _get_first),
    ("decode", "tokens/s", _get_decode),
    ("total", "s", _get_total),
)
