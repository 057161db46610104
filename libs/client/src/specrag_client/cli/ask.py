"""``specrag ask``."""

from __future__ import annotations

import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import click

from specrag_client.cli.answer_views import AnswerView, make_view
from specrag_client.cli.parameters import (
    TextType,
    collection_option,
    json_option,
    target_options,
    tenant_option,
)
from specrag_client.cli.running import run_async
from specrag_client.cli.sampling_options import read_sampling, sampling_options
from specrag_client.cli.target import orchestrator_address
from specrag_client.client import AnswerOptions, SpecragClient
from specrag_client.events import Policy, VerificationMode

if TYPE_CHECKING:
    from pathlib import Path

MAX_QUESTION_CHARS: Final = 8192
_POLICIES: Final = (Policy.JOINT.value, Policy.TARGET_ONLY.value)


@click.command()
@click.argument("question", type=TextType())
@collection_option
@click.option("--policy", type=click.Choice(_POLICIES), help="How the answer comes about.")
@click.option("--session", type=TextType(), help="Session to continue or begin.")
@sampling_options
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Same seed: same tokens.")
@click.option(
    "--mode",
    type=click.Choice((VerificationMode.REJECTION.value, VerificationMode.COUPLED.value)),
    help="How the target verifies; by default coupled with a seed, else rejection.",
)
@click.option("--passages", type=click.IntRange(1, 30), help="Passages to read.")
@click.option("--drafters", type=click.IntRange(1, 16), help="Drafters to use.")
@tenant_option
@json_option
@click.option("--events", "as_events", is_flag=True, help="Print every event as a JSON line.")
@target_options
def ask(
    question: str,
    collection: str,
    directory: Path,
    endpoint: str | None,
    *,
    as_json: bool,
    as_events: bool,
    **choices: Any,
) -> None:
    """Ask QUESTION and stream the answer with its citations.

    On a terminal, speculative text is dim and may be taken back. In a pipe, only the committed
    text is written.
    """
    if len(question) > MAX_QUESTION_CHARS:
        raise click.BadParameter(
            f"{len(question)} characters; the limit is {MAX_QUESTION_CHARS}", param_hint="QUESTION"
        )
    if as_json and as_events:
        raise click.UsageError("give --json or --events, not both")
    if choices["logprobs"] is not None and not (as_json or as_events):
        raise click.UsageError("--logprobs needs --json or --events to be shown")
    address = orchestrator_address(directory, endpoint)
    view = make_view(as_json=as_json, as_events=as_events, stdout=sys.stdout)
    run_async(_show_answer(address, question, collection, _options(choices), view))


def _options(choices: dict[str, Any]) -> AnswerOptions:
    policy, mode = choices["policy"], choices["mode"]
    return AnswerOptions(
        tenant=choices["tenant"] or "",
        session_id=choices["session"] or "",
        policy=Policy.UNSPECIFIED if policy is None else Policy(policy),
        mode=VerificationMode.UNSPECIFIED if mode is None else VerificationMode(mode),
        **read_sampling(choices),
        seed=choices["seed"],
        num_passages=choices["passages"],
        num_drafters=choices["drafters"],
    )


async def _show_answer(
    address: str, question: str, collection: str, options: AnswerOptions, view: AnswerView
) -> None:
    async with SpecragClient(address) as client:
        stream = client.answer(
            question,
            collection=collection,
            options=options,
            include_speculative=view.wants_speculative,
        )
        with view:
            async with aclosing(stream):
                async for event in stream:
                    view.show(event)
