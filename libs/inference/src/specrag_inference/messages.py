"""What goes into an :class:`~specrag_inference.engine.Engine` and what comes out of it.

Plain data without torch, so that the gRPC process of a service can speak to an engine that lives
in a process of its own. Every command and event names the sequence it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from specrag_common.speculation.proposals import DraftBranch, VerificationMode

if TYPE_CHECKING:
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

    Attributes:
        temperature: >= 0; 0 is greedy (lowest id on ties).
        top_p: (0, 1]; 1 keeps everything.
        top_k: >= 0; 0 keeps everything.
        max_tokens: most answer tokens, >= 1.
        stop: strings that end the answer; the text ends before the match.
        stop_token_ids: ids that end the answer; counted, not shown.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()


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
    """

    sequence_id: str
    prompt_token_ids: tuple[int, ...]
    answer_token_ids: tuple[int, ...] = ()
    cache_scope: bytes = b""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    mode: VerificationMode = VerificationMode.REJECTION
    random_key: bytes = bytes(16)
    drafter_index: int = 0


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
class FreeSequence:
    """Forget a sequence at once, whatever it is doing. Not answered."""

    sequence_id: str


EngineCommand = OpenSequence | VerifyTree | ProposeTokens | FreeSequence


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
class VerifiedToken:
    """One committed token.

    Attributes:
        token_id: the token.
        logprob: natural log of the target's processed law at this token.
        node_idx: the accepted tree node, or ``None`` for a residual, bonus or free-run token.
        is_bonus: drawn from the target's own law after everything proposed was accepted.
    """

    token_id: int
    logprob: float
    node_idx: int | None
    is_bonus: bool = False


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
    """

    sequence_id: str
    round: int
    tokens: tuple[VerifiedToken, ...]
    num_draft_tokens: int
    finish_reason: FinishReason | None
    stop_text_length: int | None
    forward_s: float
    last: bool


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
class SequenceFailed:
    """The sequence is gone; neighbours are unharmed.

    Attributes:
        code: ``CAPACITY`` (no blocks), ``NUMERICS`` (NaN or inf), ``INVALID`` (caller's fault).
        message: what, the value and the limit.
    """

    sequence_id: str
    code: str
    message: str


EngineEvent = SequenceOpened | RoundVerified | TokensProposed | SequenceFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot for health, metrics and leak checks.

    Attributes:
        num_running: open sequences, idle ones included.
        num_waiting: sequences not yet admitted.
        num_blocks: cache blocks.
        num_free_blocks: blocks no sequence holds, cached prefixes included.
        num_cached_blocks: free blocks that hold a prefix which can be taken up.
        num_preemptions: how often a sequence lost its blocks to another, since the start.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preemptions: int = 0


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
