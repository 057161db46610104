"""A drafter's proposal for one round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from specrag.v1 import common_pb2, drafter_pb2

from specrag_common.runtime.errors import InvalidRequest
from specrag_common.speculation.proposals import DraftBranch, DraftProposal, DraftSource
from specrag_common.wire.arrays import decode_token_ids, encode_int32
from specrag_common.wire.laws import (
    decode_law,
    decode_sibling_kind,
    encode_law,
    encode_sibling_kind,
)
from specrag_common.wire.rounds import RoundKey, decode_round_key, encode_round_key

MAX_GAMMA: Final = 64
"""Most tokens of one branch."""

MAX_BRANCHES_PER_SOURCE: Final = 8

MAX_BRANCHES: Final = MAX_BRANCHES_PER_SOURCE * len(DraftSource)
"""Most branches of one proposal."""

_SOURCES: Final = {
    DraftSource.SUFFIX: common_pb2.DRAFT_SOURCE_SUFFIX,
    DraftSource.MODEL: common_pb2.DRAFT_SOURCE_MODEL,
}
_SOURCES_DECODED: Final[dict[int, DraftSource]] = {
    message: source for source, message in _SOURCES.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedProposal:
    """A proposal with the round it answers.

    Attributes:
        key: copied from the round.
        proposal: the branches; its index and length equal the key's.
        draft_time_us: microseconds from the round's arrival to the proposal.
    """

    key: RoundKey
    proposal: DraftProposal
    draft_time_us: int


def encode_proposal(
    key: RoundKey, proposal: DraftProposal, *, draft_time_us: int
) -> drafter_pb2.TokenProposal:
    """Return the message of ``proposal``, the answer to the round ``key``."""
    return drafter_pb2.TokenProposal(
        key=encode_round_key(key),
        branches=[_encode_branch(branch) for branch in proposal.branches],
        sibling_kind=encode_sibling_kind(proposal.sibling_kind),
        draft_time_us=draft_time_us,
    )


def decode_proposal(
    message: drafter_pb2.TokenProposal,
    *,
    vocab_size: int,
    gamma: int | None = None,
    field: str = "proposal",
) -> KeyedProposal:
    """Return the proposal of ``message``.

    Args:
        message: from a drafter.
        vocab_size: ids the tokenizer knows.
        gamma: tokens a branch that the round asked for; kept in the proposal, and no branch may
            be longer.
        field: path of ``message``, for errors.

    Raises:
        InvalidRequest: a key, branch, id or law is malformed.
    """
    max_tokens = MAX_GAMMA if gamma is None else gamma
    key = decode_round_key(message.key, f"{field}.key")
    if len(message.branches) > MAX_BRANCHES:
        raise InvalidRequest(
            f"{field}.branches", f"{len(message.branches)} branches exceed {MAX_BRANCHES}"
        )
    if message.draft_time_us < 0:
        raise InvalidRequest(f"{field}.draft_time_us", f"{message.draft_time_us} is negative")
    proposal = DraftProposal(
        drafter_index=key.drafter_index,
        committed_length=key.committed_length,
        branches=tuple(
            _decode_branch(branch, f"{field}.branches[{idx}]", vocab_size, max_tokens)
            for idx, branch in enumerate(message.branches)
        ),
        sibling_kind=decode_sibling_kind(message.sibling_kind, f"{field}.sibling_kind"),
        gamma=gamma,
    )
    return KeyedProposal(key=key, proposal=proposal, draft_time_us=message.draft_time_us)


def encode_source(source: DraftSource) -> common_pb2.DraftSource.ValueType:
    """Return the enum value of ``source``."""
    return _SOURCES[source]


def decode_source(value: int, field: str) -> DraftSource:
    """Return the source; an unspecified one is refused.

    Raises:
        InvalidRequest: the value is unspecified or unknown.
    """
    try:
        return _SOURCES_DECODED[value]
    except KeyError:
        raise InvalidRequest(field, f"unspecified or unknown value {value}") from None


def _encode_branch(branch: DraftBranch) -> drafter_pb2.DraftBranch:
    is_sampled = any(law is not None for law in branch.laws)
    return drafter_pb2.DraftBranch(
        token_ids=encode_int32(branch.token_ids),
        source=encode_source(branch.source),
        laws=[encode_law(law) for law in branch.laws] if is_sampled else (),
    )


def _decode_branch(
    message: drafter_pb2.DraftBranch, field: str, vocab_size: int, max_tokens: int
) -> DraftBranch:
    ids = decode_token_ids(message.token_ids, f"{field}.token_ids", vocab_size=vocab_size)
    if not 1 <= len(ids) <= max_tokens:
        raise InvalidRequest(f"{field}.token_ids", f"{len(ids)} tokens, need 1 to {max_tokens}")
    if len(message.laws) not in (0, len(ids)):
        raise InvalidRequest(f"{field}.laws", f"{len(message.laws)} laws for {len(ids)} tokens")
    laws = tuple(
        decode_law(law, f"{field}.laws[{idx}]", vocab_size=vocab_size)
        for idx, law in enumerate(message.laws)
    )
    return DraftBranch(
        token_ids=tuple(ids.tolist()),
        laws=laws or (None,) * len(ids),
        source=decode_source(message.source, f"{field}.source"),
    )
