"""The output law through the real services equals the target's, in both modes.

A verifier and two drafters, each an engine process of its own with a tiny random fp32 model, are
driven over gRPC: two drafters draw two branches of two tokens each, the branches are merged, the
verifier decides. The joint law of the first two answer tokens is known exactly from the target's
own logits; Pearson's chi-square compares it with what was observed.

False-alarm rate: ``P_VALUE`` a test, and the keys are fixed, so a pass stays a pass. Two wrong
samplers, made on the client's side, must be caught by the same statistic on as many answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pytest
import pytest_asyncio
import torch
from scipy import stats
from specrag.v1 import drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from specrag_common.speculation.merge import merge_proposals
from specrag_common.speculation.proposals import DraftLaw, DraftSource, VerificationMode
from specrag_common.wire.sampling import SamplingOptions
from specrag_drafter.hosting import start_drafter
from specrag_drafter.settings import DrafterSettings
from specrag_inference.messages import SamplingParams
from specrag_inference.prompts import ChatTokenizer, PromptBuilder
from specrag_inference.sampling.processors import compute_law
from specrag_inference.testing import BYTE_VOCAB_SIZE
from specrag_serving.testing import (
    AnswerSetup,
    HandDrafter,
    HandVerifier,
    build_conversation,
    running,
    save_sharp_model,
)
from specrag_verifier.hosting import start_verifier
from specrag_verifier.settings import VerifierSettings
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
    from pathlib import Path

    from specrag_common.runtime.lifecycle import Lifecycle
    from specrag_common.speculation.proposals import DraftBranch, DraftProposal
    from specrag_common.speculation.token_tree import TokenTree

pytestmark = [
    pytest.mark.integration,
    pytest.mark.statistical,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

NUM_ANSWERS: Final = 600
NUM_TOKENS: Final = 2
NUM_AT_ONCE: Final = 16
P_VALUE: Final = 1e-4
SHARPNESS: Final = 2.0
SAMPLING: Final = SamplingOptions(temperature=1.0, top_p=0.9, max_tokens=NUM_TOKENS)
CONVERSATION: Final = build_conversation("a passage", "another one")

TreeMaker: TypeAlias = "Callable[[Iterable[DraftProposal]], TokenTree]"
Pair: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Stubs of the services under test and the exact law of the first tokens."""

    verifier: verifier_pb2_grpc.VerifierServiceAsyncStub
    drafters: tuple[drafter_pb2_grpc.DrafterServiceAsyncStub, ...]
    fingerprint: str
    law: dict[Pair, float]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    root = tmp_path_factory.mktemp("models")
    target = save_sharp_model(root / "target", seed=3, sharpness=SHARPNESS)
    drafts = [
        save_sharp_model(
            root / f"draft-{idx}", seed=3, sharpness=SHARPNESS, noise=0.4, noise_seed=idx
        )
        for idx in (1, 2)
    ]
    common: dict[str, Any] = {
        "dtype": "float32",
        "num_threads": 1,
        "kv_cache_mib": 16,
        "drain_notice_s": 0.0,
    }
    starts: list[Callable[[Lifecycle], Awaitable[Any]]] = [
        functools.partial(start_verifier, VerifierSettings(model=str(target), **common)),
        *(
            functools.partial(start_drafter, DrafterSettings(model=str(draft), **common))
            for draft in drafts
        ),
    ]
    async with contextlib.AsyncExitStack() as stack:
        started = await asyncio.gather(
            *(stack.enter_async_context(running(start)) for start in starts)
        )
        tokenizer = ChatTokenizer.from_folder(target)
        yield Mesh(
            verifier=verifier_pb2_grpc.VerifierServiceStub(started[0].channel),
            drafters=tuple(drafter_pb2_grpc.DrafterServiceStub(one.channel) for one in started[1:]),
            fingerprint=tokenizer.fingerprint,
            law=enumerate_law(target, tokenizer),
        )


def enumerate_law(target: Path, tokenizer: ChatTokenizer) -> dict[Pair, float]:
    """Return the probability of every start of an answer, by one forward pass a prefix."""
    model = AutoModelForCausalLM.from_pretrained(target)
    prompt = PromptBuilder(tokenizer, max_model_len=1024).build(CONVERSATION, max_tokens=NUM_TOKENS)
    params = SamplingParams(temperature=SAMPLING.temperature, top_p=SAMPLING.top_p)
    law: dict[Pair, float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer: dict[Pair, float] = {}
        for prefix, probability in law.items():
            if prefix and prefix[-1] == tokenizer.tokenizer.token_to_id("<|im_end|>"):
                longer[prefix] = probability
                continue
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt.token_ids, *prefix]])).logits[0, -1]
            step = compute_law(logits[:BYTE_VOCAB_SIZE].numpy(), params)
            for token_id in np.flatnonzero(step):
                longer[*prefix, int(token_id)] = probability * float(step[token_id])
        law = longer
    return law


def make_setup(
    mode: VerificationMode, number: int, sampling: SamplingOptions = SAMPLING
) -> AnswerSetup:
    return AnswerSetup(
        answer_id=f"{mode}-{number}",
        conversation=CONVERSATION,
        sampling=sampling,
        mode=mode,
        random_key=hashlib.sha256(f"{mode}-{number}".encode()).digest()[:16],
    )


async def answer(mesh: Mesh, mode: VerificationMode, number: int, make_tree: TreeMaker) -> Pair:
    return await draft_and_verify(mesh, make_setup(mode, number), make_tree, [DraftSource.MODEL])


async def draft_and_verify(
    mesh: Mesh, setup: AnswerSetup, make_tree: TreeMaker, sources: list[DraftSource]
) -> Pair:
    """Return the tokens of one answer, drafted by both drafters and verified."""
    async with contextlib.AsyncExitStack() as stack:
        target = await stack.enter_async_context(HandVerifier(mesh.verifier, setup))
        drafters = [
            await stack.enter_async_context(
                HandDrafter(
                    stub,
                    setup.open_drafting(mesh.fingerprint, drafter_index=idx, sources=sources),
                )
            )
            for idx, stub in enumerate(mesh.drafters)
        ]
        await asyncio.gather(
            target.wait_prefilled(), *(drafter.wait_ready() for drafter in drafters)
        )
        committed: Pair = ()
        while target.end is None:
            proposals = await asyncio.gather(
                *(drafter.draft(committed, gamma=2, num_branches=2) for drafter in drafters)
            )
            (verified,) = await target.verify(make_tree(proposals))
            committed = verified.token_ids
    return tuple(target.token_ids)


async def sample(mesh: Mesh, mode: VerificationMode, make_tree: TreeMaker) -> Counter[Pair]:
    """Return how often each start was the answer of ``NUM_ANSWERS``."""
    numbers = iter(range(NUM_ANSWERS))
    observed: Counter[Pair] = Counter()

    async def work() -> None:
        for number in numbers:
            observed[await answer(mesh, mode, number, make_tree)] += 1

    await asyncio.gather(*(work() for _ in range(NUM_AT_ONCE)))
    return observed


def compute_p_value(observed: Counter[Pair], law: dict[Pair, float]) -> float:
    """Return the chi-square p-value; starts expected less than five times are pooled."""
    total = observed.total()
    common = [start for start, probability in law.items() if probability * total >= 5]
    expected = [law[start] * total for start in common]
    counts = [observed[start] for start in common]
    expected.append(total - sum(expected))
    counts.append(total - sum(counts))
    return float(stats.chisquare(counts, expected).pvalue)


def merge(proposals: Iterable[DraftProposal]) -> TokenTree:
    return merge_proposals(list(proposals), max_draft_tokens=64)


def merge_likeliest_branches(proposals: Iterable[DraftProposal]) -> TokenTree:
    """Keep each drafter's branch whose first token it finds likeliest: chosen after looking."""
    return merge(
        replace(one, branches=(max(one.branches, key=compute_first_probability),))
        for one in proposals
    )


def compute_first_probability(branch: DraftBranch) -> float:
    law = branch.laws[0]
    assert law is not None
    return float(law.probs[np.flatnonzero(law.token_ids == branch.token_ids[0])[0]])


def merge_with_false_laws(proposals: Iterable[DraftProposal]) -> TokenTree:
    """Claim that every token was drawn from a flat law over its support."""
    tree = merge(proposals)
    return replace(
        tree, proposals=tuple(replace(one, law=flatten(one.law)) for one in tree.proposals)
    )


def flatten(law: DraftLaw | None) -> DraftLaw | None:
    if law is None:
        return None
    size = len(law.token_ids)
    return DraftLaw(token_ids=law.token_ids, probs=np.full(size, 1 / size, np.float32))


@pytest.mark.parametrize("mode", list(VerificationMode))
async def test_law_of_the_answers_is_the_targets(
    mesh: Mesh, mode: VerificationMode, record_property: Callable[[str, object], None]
) -> None:
    observed = await sample(mesh, mode, merge)

    assert set(observed) <= set(mesh.law)
    p_value = compute_p_value(observed, mesh.law)
    record_property("p_value", p_value)
    assert p_value > P_VALUE


@pytest.mark.parametrize("make_tree", [merge_likeliest_branches, merge_with_false_laws])
async def test_wrong_sampler_is_caught(
    mesh: Mesh, make_tree: TreeMaker, record_property: Callable[[str, object], None]
) -> None:
    observed = await sample(mesh, VerificationMode.REJECTION, make_tree)

    p_value = compute_p_value(observed, mesh.law)
    record_property("p_value", p_value)
    assert p_value < P_VALUE


@pytest.mark.parametrize(
    ("mode", "temperature"),
    [
        (VerificationMode.REJECTION, 0.0),
        (VerificationMode.COUPLED, 0.0),
        (VerificationMode.COUPLED, 1.0),
    ],
)
async def test_drafted_answers_are_token_for_token_those_of_generate(
    mesh: Mesh, mode: VerificationMode, temperature: float
) -> None:
    sampling = SamplingOptions(temperature=temperature, top_p=0.9, max_tokens=40)

    for number in range(8):
        setup = make_setup(mode, number, sampling)
        request = verifier_pb2.GenerateRequest(open=setup.open_verification())
        expected: list[int] = []
        async for response in mesh.verifier.Generate(request):
            expected += np.frombuffer(response.verified.token_ids, dtype="<i4").tolist()
        drafted = await draft_and_verify(mesh, setup, merge, list(DraftSource))
        assert list(drafted) == expected


async def test_wrong_laws_cannot_change_coupled_answers(mesh: Mesh) -> None:
    for number in range(20):
        honest = await answer(mesh, VerificationMode.COUPLED, number, merge)
        false = await answer(mesh, VerificationMode.COUPLED, number, merge_with_false_laws)
        assert honest == false
