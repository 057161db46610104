"""Every span name and attribute key of the project, declared once.

RPC spans are named after their method (``specrag.v1.RagService/Answer``); the names here are the
steps inside. Keys follow the RPC and GenAI semantic conventions; our own are under ``specrag.``.
Content (prompts, passages, answers) is never an attribute.
"""

from __future__ import annotations

from enum import StrEnum


class SpanName(StrEnum):
    """Steps of a request."""

    RETRIEVE = "specrag.retrieve"
    """Orchestrator: search for the passages of one question."""
    PARTITION = "specrag.partition"
    """Orchestrator: split the passages over the drafters."""
    DRAFT = "specrag.draft"
    """Orchestrator: one drafter's stream within one answer."""
    PREFILL = "specrag.prefill"
    """Verifier or drafter: a prompt enters the block cache."""
    ROUND = "specrag.round"
    """Orchestrator: one draft–verify round."""
    VERIFY = "specrag.verify"
    """Verifier: one target pass over a token tree."""
    COMMIT = "specrag.commit"
    """Orchestrator: accepted tokens become text and events."""
    SAVE_TURN = "specrag.save_turn"
    """Orchestrator: the turn is appended to the turn log."""
    EMBED = "specrag.embed"
    """Retriever: texts become vectors."""
    INGEST = "specrag.ingest"
    """Retriever: one document is parsed, cut, embedded and stored."""
    SEARCH_INDEX = "specrag.search_index"
    """Retriever: the query runs in the vector store."""


class SpanKey(StrEnum):
    """Attribute keys."""

    RPC_SYSTEM = "rpc.system.name"
    """Always ``grpc``."""
    RPC_METHOD = "rpc.method"
    """Full method name, as ``specrag.v1.RagService/Answer``."""
    RPC_STATUS_CODE = "rpc.response.status_code"
    """Name of the gRPC status code, as ``OK``."""
    ERROR_TYPE = "error.type"
    """``ErrorInfo`` reason, or the class of an unexpected exception."""
    REQUEST_ID = "specrag.request_id"
    """Id of the caller's request."""
    SESSION_ID = "specrag.session_id"
    """Session whose turn is served."""
    ANSWER_ID = "specrag.answer_id"
    """Answer being produced."""
    COLLECTION = "specrag.collection"
    """Collection searched or written."""
    POLICY = "specrag.policy"
    """Answer policy that served the request."""
    VERIFICATION_MODE = "specrag.verification_mode"
    """REJECTION or COUPLED."""
    ROUND = "specrag.round"
    """Number of the round, from 0."""
    DRAFTER = "specrag.drafter"
    """Name of the drafter."""
    NUM_PASSAGES = "specrag.num_passages"
    """Passages in play."""
    NUM_DRAFT_TOKENS = "specrag.num_draft_tokens"
    """Proposed tokens before merging."""
    NUM_ACCEPTED_TOKENS = "specrag.num_accepted_tokens"
    """Proposed tokens the target accepted."""
    NUM_ROUNDS = "specrag.num_rounds"
    """Rounds a stream asked for."""
    NUM_STALE_ROUNDS = "specrag.num_stale_rounds"
    """Of these, rounds that continued other tokens than the stream's own."""
    NUM_CHUNKS = "specrag.num_chunks"
    """Passages or windows written."""
    NUM_CACHED_TOKENS = "specrag.num_cached_tokens"
    """Prompt tokens found in the prefix cache."""
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    """Prompt tokens."""
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    """Answer tokens."""
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    """Why the answer ended."""
