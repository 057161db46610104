"""Tokens a round for sets of drafters, replayed from recorded traces.

Usage: python -m bench.merging --data FOLDER --traces FOLDER [--out R.json]

``bench.merging.record`` makes the traces. A round's tokens are the accepted ones and the final one.
The answer's end cuts the last round short; ``uncut`` leaves out rounds with no more than gamma
tokens left (temperature 0). At temperature 0 both verification modes commit the same; at
temperature 1 COUPLED is replayed exactly, REJECTION by the sequential rule, 16 draws a question.
Nodes are counted as far as branches follow the answer.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.merging.configurations import (
    NUM_REJECTION_DRAWS,
    Configuration,
    list_further,
    list_main,
    list_with_best,
)
from bench.merging.coupled_rounds import Tally
from bench.merging.subsets import NUMBERS_OF_DRAFTERS
from bench.merging.traces import Temperature, load_traces
from bench.question_sets import load_questions
from bench.results import (
    BenchResult,
    ResultRow,
    at_least,
    describe_command,
    describe_machine,
    write_result,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.merging.traces import QuestionTrace
    from bench.question_sets import ClosedQuestion

AIM = 5.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One configuration over all questions."""

    configuration: Configuration
    greedy: Tally
    coupled: Tally
    rejection: Tally | None

    def describe(self) -> str:
        """Return a row of the table."""
        rejection = "    –" if self.rejection is None else f"{self.rejection.tokens_a_round:5.2f}"
        nodes = self.greedy.num_nodes / self.greedy.num_rounds
        values = (
            self.greedy.tokens_an_uncut_round,
            self.greedy.tokens_a_round,
            self.coupled.tokens_a_round,
        )
        figures = "   ".join(f"{value:5.2f}" for value in values)
        return f"{self.configuration.name:68} {figures}   {rejection}   {nodes:5.1f}"


def measure(
    configuration: Configuration, pairs: Sequence[tuple[QuestionTrace, ClosedQuestion]]
) -> Line:
    """Replay all questions."""
    greedy, coupled, rejection = Tally(), Tally(), Tally()
    has_rejection = True
    for trace, question in pairs:
        greedy += configuration.replay(trace, question, Temperature.GREEDY)
        coupled += configuration.replay(trace, question, Temperature.SAMPLED)
        drawn = configuration.replay_rejection(trace, question)
        has_rejection = has_rejection and drawn is not None
        rejection += drawn or Tally()
    return Line(
        configuration=configuration,
        greedy=greedy,
        coupled=coupled,
        rejection=rejection if has_rejection else None,
    )


def load_pairs(
    data: Path, traces: Path, configurations: Sequence[Configuration]
) -> list[tuple[QuestionTrace, ClosedQuestion]]:
    """Return the questions for which every drafter of the configurations is recorded."""
    questions = {one.question_id: one for one in load_questions(data, "hotpotqa", limit=1000)}
    pairs = [(trace, questions[trace.question_id]) for trace in load_traces(traces)]
    return [
        (trace, question)
        for trace, question in pairs
        if all(
            passages in trace.drafters
            for one in configurations
            for team in one.list_teams(question)
            for passages in team
        )
    ]


def print_table(
    title: str,
    configurations: Sequence[Configuration],
    pairs: Sequence[tuple[QuestionTrace, ClosedQuestion]],
) -> list[Line]:
    """Measure and print, one configuration after the other."""
    if not pairs:
        print(f"{title}: no question is recorded for it")
        return []
    num_tokens = sum(len(trace.target.greedy_ids) for trace, _ in pairs)
    print(f"\n{title}: {len(pairs)} questions, {num_tokens / len(pairs):.0f} answer tokens each")
    print(f"{'drafters':68} {'uncut':>5}   {'T = 0':>5}   {'coup.':>5}   {'rej.':>5}   nodes")
    lines = []
    for configuration in configurations:
        lines.append(measure(configuration, pairs))
        print(lines[-1].describe(), flush=True)
    return lines


def to_rows(lines: Sequence[Line], *, has_bar: bool) -> list[ResultRow]:
    """Return the figures; the largest merged sets of draft models have the bar."""
    rows = []
    for line in lines:
        name, tally = line.configuration.name, line.greedy.tokens_a_round
        is_largest = line.configuration.num_drafters == max(NUMBERS_OF_DRAFTERS)
        if has_bar and is_largest and line.configuration.is_merged:
            rows.append(at_least(f"{name}: tokens a round", tally, AIM))
        else:
            rows.append(ResultRow(what=f"{name}: tokens a round", value=tally))
        rows.append(ResultRow(what=f"{name}: coupled, T = 1", value=line.coupled.tokens_a_round))
        if line.rejection is not None:
            value = line.rejection.tokens_a_round
            rows.append(ResultRow(what=f"{name}: rejection, T = 1", value=value))
    return rows


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[ResultRow] = []
    num_questions = 0
    for title, configurations in (
        ("as asked", list_main()),
        ("other ways", list_further()),
        ("the best passages in every subset", list_with_best()),
    ):
        pairs = load_pairs(arguments.data, arguments.traces, configurations)
        num_questions = max(num_questions, len(pairs))
        rows += to_rows(print_table(title, configurations, pairs), has_bar=title == "as asked")
    if arguments.out:
        result = BenchResult(
            name="merging",
            rows=tuple(rows),
            command=describe_command("bench.merging"),
            conditions=(
                f"{num_questions} HotpotQA questions of ten passages, gamma 8, REJECTION "
                f"{NUM_REJECTION_DRAWS} draws; {describe_machine()}"
            ),
        )
        write_result(arguments.out, result)


if __name__ == "__main__":
    main()
