"""The sampling flags of ``specrag ask``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from specrag_client.cli.parameters import FiniteRange, TextType, TokenBiasType

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _collect_biases(
    _context: click.Context, _param: click.Parameter, pairs: tuple[tuple[int, float], ...]
) -> dict[int, float]:
    """Return the pairs by token id; none may come twice."""
    biases = dict(pairs)
    if len(biases) < len(pairs):
        raise click.BadParameter("a token id is given twice")
    return biases


_OPTIONS: Final = (
    click.option("--temperature", type=FiniteRange(0, 2), help="0 (greedy, default) to 2."),
    click.option(
        "--top-p", type=FiniteRange(0, 1, min_open=True), help="Over 0 to 1 (default: all)."
    ),
    click.option("--top-k", type=click.IntRange(0, 2**31 - 1), help="Tokens kept; 0 keeps all."),
    click.option(
        "--min-p", type=FiniteRange(0, 1), help="Least share of the likeliest token's probability."
    ),
    click.option(
        "--repetition-penalty",
        type=FiniteRange(0.1, 10),
        help="Over 1: fewer tokens of prompt and answer again.",
    ),
    click.option(
        "--presence-penalty", type=FiniteRange(-2, 2), help="Over 0: fewer of the answer's tokens."
    ),
    click.option(
        "--frequency-penalty",
        type=FiniteRange(-2, 2),
        help="Over 0: fewer of the answer's frequent tokens.",
    ),
    click.option(
        "--logit-bias",
        type=TokenBiasType(),
        multiple=True,
        callback=_collect_biases,
        metavar="ID=VALUE",
        help="Add -100 to 100 to a token's logit; repeatable.",
    ),
    click.option("--max-tokens", type=click.IntRange(1, 4096), help="Longest answer in tokens."),
    click.option(
        "--min-tokens", type=click.IntRange(0, 4096), help="Tokens before the answer may end."
    ),
    click.option(
        "--stop", type=TextType(), multiple=True, help=r"End before this text; \n is a line end."
    ),
    click.option(
        "--logprobs",
        type=click.IntRange(0, 20),
        help="Report log-probabilities, with so many likely tokens each (--json, --events).",
    ),
)


def sampling_options(function: _Function) -> _Function:
    """Add what makes the output law and ends the answer."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def read_sampling(choices: dict[str, Any]) -> dict[str, Any]:
    """Return the values of :func:`sampling_options` as fields of ``AnswerOptions``."""
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "max_tokens",
        "min_tokens",
    )
    return {
        **{name: choices[name] for name in names},
        "stop": tuple(stop.replace("\\n", "\n") for stop in choices["stop"]),
        "num_top_logprobs": choices["logprobs"],
    }
