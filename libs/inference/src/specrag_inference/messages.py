"""What goes into an :class:`~specrag_inference.engine.Engine` and what comes out of it.

Plain data without torch, so that the gRPC process of a service can speak to an engine that lives
in a process of its own. Every command and event names the sequence it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from specrag_common.speculation.proposals import DraftBranch, VerificationMode

from specrag_inference.engine_stats import EngineStats

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from specrag_common.speculation.token_tree import TokenTree


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP_TOKEN = "stop_token"  # noqa: S105 - no password
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CONTEXT = "context"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the output law is made from logits, and when an answer ends.

    The order in which the law's fields act is told in
    :mod:`~specrag_inference.sampling.processors`.

    Attributes:
        temperature: >= 0; 0 is greedy (lowest id on ties).
        top_p: (0, 1]; 1 keeps everything.
        top_k: >= 0; 0 keeps everything.
        min_p: [0, 1] of the most likely token's probability; less likely tokens are ruled out.
        repetition_penalty: > 0; over 1 makes tokens of prompt and answer less likely; 1 is neutral.
        presence_penalty: subtracted once from the logit of every token of the answer.
        frequency_penalty: subtracted from it for each time the token came in the answer.
        logit_bias: (token id, what is added to its logit), ids distinct.
        max_tokens: most answer tokens, >= 1.
        min_tokens: answer tokens before the answer may end by itself: until then ``stop_token_ids``
            are ruled out, and stop strings count only in the text behind them.
        stop: strings that end the answer; the text ends before the match.
        stop_token_ids: ids that end the answer; counted, not shown.
        num_top_logprobs: how many of the most likely tokens are reported beside each committed one;
            0 reports the committed one's log-probability alone, ``None`` means nobody asked.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    num_top_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSequence:
    """Admit a sequence and prefill its prompt. Answered by ``SequenceOpened``.

    Attributes:
        sequence_id: unique among live sequences.
        prompt_token_ids: the whole prompt; at least one token.
        answer_token_ids: tokens of the answer already committed (resume); usually empty.
        cache_scope: goes into the prefix hash (tenant and cache epoch): prefixes are shared only
            within one scope.
        sampling: the law and the ends.
        mode: verification or drafting mode.
        random_key: 16 bytes that seed every draw of this sequence.
        drafter_index: set for draft sequences: which drafter of the request this is.
        deadline_s: seconds from here on that the sequence may live, whatever it is doing then;
            ``None`` = no limit.
    """

    sequence_id: str
    prompt_token_ids: tuple[int, ...]
    answer_token_ids: tuple[int, ...] = ()
    cache_scope: bytes = b""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    mode: VerificationMode = VerificationMode.REJECTION
    random_key: bytes = bytes(16)
    drafter_index: int = 0
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyTree:
    """Verify one token tree, then decode ``free_run_tokens`` more alone.

    Answered by ``RoundVerified``; each free-run token by a further ``RoundVerified`` of the same
    round with an empty path (``last`` is set on the final one).
    """

    sequence_id: str
    round: int
    tree: TokenTree
    free_run_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposeTokens:
    """Bring a draft sequence to the committed state, then draft. Answered by ``TokensProposed``.

    Attributes:
        committed_token_ids: answer tokens committed since the last command, bonus included.
        gamma: tokens a branch; 0 only ingests.
        num_branches: independently drawn branches (further ranks in COUPLED mode).
    """

    sequence_id: str
    round: int
    committed_token_ids: tuple[int, ...]
    gamma: int
    num_branches: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTree:
    """Give the log-probs of a tree behind the open sequence. Answered by ``TreeScored``.

    The sequence stays as it is. Branches see the sequence and their own ancestors, never each
    other. The tree may be larger than a pass, and larger than the cache: its longest branch counts.

    Attributes:
        score_id: the caller's number of the command.
        token_ids: [num_nodes] int32.
        parent_idx: [num_nodes] int32, each < its own index, ``ROOT`` for the first level.
        is_wanted: [num_nodes] bool: whose log-prob is asked for; ``None`` = everybody's. Nodes that
            only stand before wanted ones (passages, questions) are cheaper left out.
    """

    sequence_id: str
    score_id: int
    token_ids: NDArray[np.int32]
    parent_idx: NDArray[np.int32]
    is_wanted: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSequence:
    """Forget a sequence at once, whatever it is doing. Not answered."""

    sequence_id: str


JobCommand = VerifyTree | ProposeTokens | ScoreTree
"""Commands to an open sequence, carried out in the order they came."""

EngineCommand = OpenSequence | JobCommand | FreeSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOpened:
    """The prompt's keys and values are in the cache.

    Attributes:
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: how many of them came from the prefix cache.
        prefill_s: seconds from admission to the end of the prefill.
    """

    sequence_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    prefill_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token with its natural log-probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedToken:
    """One committed token.

    Log-probabilities are the target's, behind all processors. At temperature 0 that law is one-hot
    and says nothing: when log-probabilities were asked for, they are those of temperature 1 there.

    Attributes:
        token_id: the token.
        logprob: its log-probability.
        node_idx: the accepted tree node, or ``None`` for a residual, bonus or free-run token.
        is_bonus: drawn from the target's own law after everything proposed was accepted.
        top_logprobs: the most likely tokens in its place, best first, as many as were asked for;
            fewer where the law holds fewer.
    """

    token_id: int
    logprob: float
    node_idx: int | None
    is_bonus: bool = False
    top_logprobs: tuple[TokenLogprob, ...] = ()


class PassLoad(NamedTuple):
    """How full a forward pass was: its tokens, and the sequences that shared it."""

    num_tokens: int
    num_sequences: int


UNKNOWN_LOAD: Final = PassLoad(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundVerified:
    """Outcome of one target pass.

    Attributes:
        tokens: committed tokens in order: accepted nodes, then the final token (absent when the
            answer ended inside the accepted path). Cut at the finish: nothing follows it.
        num_draft_tokens: proposed tokens before merging.
        finish_reason: set when the answer ends with the last of ``tokens``.
        stop_text_length: code points of the whole answer's text kept, when a stop string ended it.
        forward_s: seconds of the forward pass this round took part in.
        last: no further event of this round follows.
        load: how full that pass was.
    """

    sequence_id: str
    round: int
    tokens: tuple[VerifiedToken, ...]
    num_draft_tokens: int
    finish_reason: FinishReason | None
    stop_text_length: int | None
    forward_s: float
    last: bool
    load: PassLoad = UNKNOWN_LOAD


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensProposed:
    """Branches drawn for one round.

    Attributes:
        branches: in draw order; empty when ``gamma`` was 0 or the context is full.
        draft_s: seconds from the command to this event.
    """

    sequence_id: str
    round: int
    branches: tuple[DraftBranch, ...]
    draft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeScored:
    """The log-probs of one ``ScoreTree``.

    They are of the raw law: log-softmax of the logits over the tokenizer's ids, temperature 1, no
    processors.

    Attributes:
        score_id: the command's.
        logprobs: [num_nodes] float32, of each node's token given the sequence and its ancestors;
            NaN where it was not asked for.
        num_passes: forward passes that computed some of it.
        score_s: seconds from the command to this event.
    """

    sequence_id: str
    score_id: int
    logprobs: NDArray[np.float32]
    num_passes: int
    score_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFailed:
    """The sequence is gone; neighbours are unharmed.

    Attributes:
        code: ``CAPACITY`` (no blocks), ``OVERLOADED`` (a queue is full), ``DEADLINE`` (out of
            time), ``NUMERICS`` (NaN or inf), ``INVALID`` (caller's fault).
        message: what, the value and the limit.
    """

    sequence_id: str
    code: str
    message: str


EngineEvent = SequenceOpened | RoundVerified | TokensProposed | TreeScored | SequenceFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsRequest:
    """Asks an engine process for its ``EngineStats``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """First message of an engine process: the model is loaded.

    Attributes:
        model_id: short name.
        revision: fingerprint of config and weights.
        max_model_len: longest sequence in tokens.
        vocab_size: ids the tokenizer knows: one more than the largest; padding is not counted.
        eos_token_ids: ids that end an answer.
        num_blocks: cache blocks.
        block_size: tokens a block.
        dtype: of weights and cache, ``bfloat16`` or ``float32``.
    """

    model_id: str
    revision: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    num_blocks: int
    block_size: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCrashed:
    """Last message of an engine process that ends by an error; it exits non-zero."""

    message: str


EngineMessage = EngineCommand | StatsRequest | tuple[EngineCommand | StatsRequest, ...] | None
"""What an engine process receives; ``None`` ends it."""

EngineReply = EngineReady | tuple[EngineEvent, ...] | EngineStats | EngineCrashed
"""What an engine process sends; events of one step come together."""
