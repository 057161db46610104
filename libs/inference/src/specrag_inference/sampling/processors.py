"""Logits to the law of one token.

Order of the chain, the field's usual one:

1. logit bias;
2. minimum length: end-of-answer tokens are ruled out while the answer is too short;
3. repetition, frequency and presence penalties;
4. temperature (0: the argmax, the lowest id on ties, and nothing further);
5. min-p, top-k, top-p, each of what the one before left, then softmax.

The target's processed law is what speculation must reproduce; the drafter may process as it likes,
and processes likewise, which raises acceptance. Steps 1 to 3 may change the argmax: they run at
temperature 0 too. They see the tokens before the node: see
:mod:`~specrag_inference.sampling.history`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from specrag_inference.sampling.adjustments import LogitBias, MinTokens, Penalties
from specrag_inference.sampling.history import NO_HISTORY
from specrag_inference.sampling.numerics import NumericsError, check_finite
from specrag_inference.sampling.truncation import Candidates, MinP, TopK, TopP

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specrag_inference.messages import SamplingParams
    from specrag_inference.sampling.history import TokenHistory
    from specrag_inference.sampling.truncation import Floats, Truncation


class LogitsProcessor(Protocol):
    """One step before the temperature: it may change the argmax.

    Pure: the same logits and history give the same result, in any order of calls, since the walk
    asks for nodes of a tree and for some of them never.

    A processor with a state of its own (a grammar's automaton) keeps the state behind the committed
    tokens only. It advances it, at the next call, by those of ``history.committed`` that it has not
    taken, and walks a copy along ``history.path``; what the path did is forgotten with the copy.
    Copies may be kept by path while ``history.committed.num_answer_tokens`` stays what it was.
    Tokens that it rules out get ``-inf``; at least one stays.
    """

    def __call__(self, logits: NDArray[Floats], history: TokenHistory) -> NDArray[Floats]:
        """Return processed logits: [vocab_size], dtype kept, input left alone."""
        ...


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise ``ValueError`` when the parameters name tokens that the vocabulary lacks."""
    for token_id, _ in params.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token id {token_id} of logit_bias is outside [0, {vocab_size})")


def build_processors(params: SamplingParams) -> tuple[LogitsProcessor, ...]:
    """Return what runs before the temperature, in order; only what is switched on."""
    chain: list[LogitsProcessor] = []
    if params.logit_bias:
        chain.append(LogitBias(params.logit_bias))
    if params.min_tokens and params.stop_token_ids:
        chain.append(MinTokens(params.min_tokens, params.stop_token_ids))
    if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
        chain.append(
            Penalties(
                repetition=params.repetition_penalty,
                frequency=params.frequency_penalty,
                presence=params.presence_penalty,
            )
        )
    return tuple(chain)


def build_truncations(params: SamplingParams) -> tuple[Truncation, ...]:
    """Return what runs behind a temperature above 0; only what is switched on.

    Min-p and top-k may change places: each keeps the most likely tokens up to a rank, so that in
    either order the smaller set remains. Top-k first leaves less to look at.
    """
    chain: list[Truncation] = []
    if params.top_k:
        chain.append(TopK(params.top_k))
    if params.min_p:
        chain.append(MinP(params.min_p))
    if params.top_p < 1.0:
        chain.append(TopP(params.top_p))
    return tuple(chain)


class LawChain:
    """The whole chain of one set of parameters, built once for all nodes of a sequence."""

    __slots__ = ("_processors", "_temperature", "_truncations")

    def __init__(self, params: SamplingParams) -> None:
        """Build the chain."""
        self._processors = build_processors(params)
        self._truncations = build_truncations(params)
        self._temperature = params.temperature

    @property
    def is_greedy(self) -> bool:
        """Whether the law is one-hot: temperature 0."""
        return self._temperature == 0.0

    def adjust(self, logits: NDArray[Floats], history: TokenHistory) -> NDArray[Floats]:
        """Return the logits behind steps 1 to 3; ``-inf`` where a token is ruled out.

        Raises:
            NumericsError: a logit is NaN or infinite, given or made so.
        """
        check_finite(logits, "logits")
        if not self._processors:
            return logits
        adjusted = logits
        for processor in self._processors:
            adjusted = processor(adjusted, history)
        if not np.isfinite(adjusted.max()):
            raise NumericsError(
                f"of {adjusted.size} processed logits the largest is {adjusted.max()}: "
                "every token is ruled out, or one overflowed"
            )
        return adjusted

    def compute_law_of(self, adjusted: NDArray[Floats]) -> NDArray[Floats]:
        """Return the law of what :meth:`adjust` returned; see :func:`compute_law`."""
        if self.is_greedy:
            law = np.zeros_like(adjusted)
            law[int(np.argmax(adjusted))] = 1.0
            return law
        candidates = Candidates(_scale(adjusted, self._temperature))
        for truncation in self._truncations:
            candidates = truncation(candidates)
        return candidates.compute_law(len(adjusted))

    def compute_law(self, logits: NDArray[Floats], history: TokenHistory) -> NDArray[Floats]:
        """Return the law of the next token; see :func:`compute_law`."""
        return self.compute_law_of(self.adjust(logits, history))


def compute_law(
    logits: NDArray[Floats], params: SamplingParams, history: TokenHistory = NO_HISTORY
) -> NDArray[Floats]:
    """Return the law of the next token after all processors.

    Args:
        logits: [vocab_size] float32 or float64, finite. Padding ids are cut off by the caller.
        params: what makes the law.
        history: the tokens before; only penalties and the minimum length look at it.

    Returns:
        [vocab_size], dtype of ``logits``, sums to 1. At temperature 0 one-hot at the argmax, the
        lowest id on ties.

    Raises:
        NumericsError: a logit is NaN or infinite, or every token is ruled out.
    """
    return LawChain(params).compute_law(logits, history)


def softmax(logits: NDArray[Floats]) -> NDArray[Floats]:
    """Return exp(logits) normalised; the sum is taken in float64."""
    return Candidates(logits - logits.max()).compute_law(len(logits))


def _scale(logits: NDArray[Floats], temperature: float) -> NDArray[Floats]:
    """Return logits / temperature, shifted so that the largest stays 0 however small it is."""
    divisor = max(logits.dtype.type(temperature), np.finfo(logits.dtype).tiny)
    with np.errstate(over="ignore"):
        scaled: NDArray[Floats] = logits - logits.max()
        if divisor != 1.0:
            scaled /= divisor
    return scaled
