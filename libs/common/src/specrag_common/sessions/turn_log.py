"""The turn log: what a session said, appended once, in order, by the holder of its lease.

Keys of one session share a hash tag: ``…:meta`` (hash), ``…:turns`` (list of JSON), ``…:lease``,
``…:fence``. A sorted set per owner lists the sessions; it may lag behind a crash and heals itself.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Protocol

from pydantic import TypeAdapter, ValidationError

from specrag_common.runtime.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidRequest,
    NotFound,
    SessionFull,
    TurnNotSaved,
    UpstreamUnavailable,
)
from specrag_common.runtime.logs import get_logger
from specrag_common.sessions.lease import fence_key, lease_key
from specrag_common.sessions.model import (
    Session,
    SessionInfo,
    SessionKey,
    SessionLimits,
    SessionPage,
    Turn,
)
from specrag_common.sessions.redis_client import redis_errors
from specrag_common.sessions.session_index import IndexEntry, SessionIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.asyncio import Redis

    from specrag_common.sessions.lease import SessionLease

MAX_PAGE_SIZE: Final = 200

_TURN: Final = TypeAdapter(Turn)

_APPEND: Final = """
local fence = tonumber(redis.call('GET', KEYS[3]) or '0')
if fence > tonumber(ARGV[1]) then return {'FENCED', 0} end
local version = tonumber(redis.call('HGET', KEYS[1], 'version') or '0')
if version ~= tonumber(ARGV[2]) then
  local last = redis.call('HMGET', KEYS[1], 'last_request_id', 'last_token')
  if last[1] == ARGV[4] and last[2] == ARGV[1] then return {'OK', version} end
  return {'VERSION', version}
end
redis.call('RPUSH', KEYS[2], ARGV[3])
redis.call('HSETNX', KEYS[1], 'created_at', ARGV[6])
redis.call('HSET', KEYS[1], 'version', version + 1, 'next_passage_number', ARGV[5],
  'updated_at', ARGV[6], 'collection', ARGV[8], 'last_request_id', ARGV[4],
  'last_token', ARGV[1])
redis.call('HINCRBY', KEYS[1], 'num_turns', 1)
redis.call('HINCRBY', KEYS[1], 'num_bytes', #ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[7])
redis.call('PEXPIRE', KEYS[2], ARGV[7])
return {'OK', version + 1}
"""

_DELETE: Final = """
local existed = redis.call('EXISTS', KEYS[1])
redis.call('DEL', KEYS[1], KEYS[2], KEYS[4])
local last = tonumber(redis.call('GET', KEYS[3]) or '0')
if last > 0 then
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
  redis.call('SET', KEYS[3], string.format('%.0f', math.max(now, last + 1)), 'PX', 3600000)
end
return existed
"""

_log = get_logger(__name__)


class TurnLog(Protocol):
    """Durable history of sessions. Every method may raise ``UpstreamUnavailable``."""

    async def read_session(self, key: SessionKey) -> Session:
        """Return a stored session.

        Raises:
            NotFound: there is none of this owner; another owner's is not told from none.
        """
        ...

    async def open_session(self, key: SessionKey, *, collection: str) -> Session:
        """Return the session a turn is about to continue, or an empty one. Hold its lease.

        Raises:
            SessionFull: it holds as many turns or bytes as it may.
            FailedPrecondition: it belongs to another collection.
        """
        ...

    async def append_turn(
        self, session: SessionInfo, turn: Turn, *, lease: SessionLease, next_passage_number: int
    ) -> SessionInfo:
        """Append a turn to the session as it was opened; returns it as it is now.

        The same call again (same lease, version and request id) appends nothing more.

        Raises:
            TurnNotSaved: the lease was lost, the session changed or was deleted, the turn is too
                large, or the store does not answer. Nothing was appended, or the caller must
                assume so.
        """
        ...

    async def list_sessions(
        self, *, tenant: str, subject: str = "", page_size: int = 50, page_token: str = ""
    ) -> SessionPage:
        """Return sessions of one owner, the last changed first.

        Raises:
            InvalidRequest: bad page size or token.
        """
        ...

    async def delete_session(self, key: SessionKey) -> None:
        """Purge a session; a turn that is running on it will not be saved.

        Raises:
            NotFound: there is none of this owner.
        """
        ...


class RedisTurnLog:
    """A :class:`TurnLog` in Redis or Valkey."""

    def __init__(self, client: Redis, *, limits: SessionLimits | None = None) -> None:
        """Use ``client``, which stays the caller's; its server must never evict these keys."""
        self._client = client
        self._limits = limits or SessionLimits()
        self._index = SessionIndex(client, ttl_s=self._limits.ttl_s)
        self._append = client.register_script(_APPEND)
        self._delete = client.register_script(_DELETE)

    async def read_session(self, key: SessionKey) -> Session:
        """See :class:`TurnLog`."""
        session = await self._load(key)
        if session is None:
            raise _not_found(key)
        return session

    async def open_session(self, key: SessionKey, *, collection: str) -> Session:
        """See :class:`TurnLog`."""
        session = await self._load(key)
        if session is None:
            return Session(info=SessionInfo(key=key, collection=collection))
        info = session.info
        if info.collection != collection:
            raise FailedPrecondition(
                f"session {key.session_id!r} belongs to collection {info.collection!r}, "
                f"not {collection!r}; begin another session",
                reason="SESSION_COLLECTION",
            )
        self._check_room(info)
        return session

    async def append_turn(
        self, session: SessionInfo, turn: Turn, *, lease: SessionLease, next_passage_number: int
    ) -> SessionInfo:
        """See :class:`TurnLog`."""
        assert lease.key == session.key, "the lease belongs to another session"
        body = _TURN.dump_json(turn)
        if len(body) > self._limits.max_turn_bytes:
            raise TurnNotSaved(
                f"the turn has {len(body)} bytes, the limit is {self._limits.max_turn_bytes}"
            )
        now = datetime.now(UTC)
        try:
            with redis_errors("save the turn"):
                outcome, version = await self._append(
                    keys=[_meta_key(session.key), _turns_key(session.key), fence_key(session.key)],
                    args=[
                        lease.token,
                        session.version,
                        body,
                        turn.request_id,
                        next_passage_number,
                        now.isoformat(),
                        self._limits.ttl_s * 1000,
                        session.collection,
                    ],
                )
        except UpstreamUnavailable as exc:
            raise TurnNotSaved(exc.message, retry_delay_s=exc.retry_delay_s) from exc
        if outcome != b"OK":
            why = "another request took over" if outcome == b"FENCED" else "it changed meanwhile"
            raise TurnNotSaved(f"session {session.key.session_id!r}: {why} (now {version})")
        await self._list(session.key, now)
        return SessionInfo(
            key=session.key,
            collection=session.collection,
            version=int(version),
            next_passage_number=next_passage_number,
            num_turns=session.num_turns + 1,
            num_bytes=session.num_bytes + len(body),
            created_at=session.created_at or now,
            updated_at=now,
        )

    async def list_sessions(
        self, *, tenant: str, subject: str = "", page_size: int = 50, page_token: str = ""
    ) -> SessionPage:
        """See :class:`TurnLog`."""
        if not 1 <= page_size <= MAX_PAGE_SIZE:
            raise InvalidRequest("page_size", f"{page_size} is not within 1–{MAX_PAGE_SIZE}")
        after = IndexEntry.of_page_token(page_token) if page_token else None
        with redis_errors("list the sessions"):
            entries = await self._index.following(tenant, subject, after, page_size + 1)
            shown = entries[:page_size]
            keys = [
                SessionKey(tenant=tenant, subject=subject, session_id=entry.session_id)
                for entry in shown
            ]
            infos = await self._infos(keys)
            gone = [key for key, info in zip(keys, infos, strict=True) if info is None]
            await self._index.remove(gone)
        has_more = len(entries) > page_size
        return SessionPage(
            sessions=tuple(info for info in infos if info is not None),
            next_page_token=shown[-1].page_token() if has_more else "",
        )

    async def delete_session(self, key: SessionKey) -> None:
        """See :class:`TurnLog`."""
        with redis_errors("delete the session"):
            existed = await self._delete(
                keys=[_meta_key(key), _turns_key(key), fence_key(key), lease_key(key)], args=[]
            )
            await self._index.remove([key])
        if not existed:
            raise _not_found(key)

    async def _load(self, key: SessionKey) -> Session | None:
        with redis_errors("read the session"):
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.hgetall(_meta_key(key))
                pipe.lrange(_turns_key(key), 0, -1)
                meta, rows = await pipe.execute()
        if not meta:
            return None
        return Session(info=_read_info(key, meta), turns=_read_turns(key, rows))

    async def _infos(self, keys: Sequence[SessionKey]) -> list[SessionInfo | None]:
        async with self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hgetall(_meta_key(key))
            rows = await pipe.execute()
        return [
            _read_info(key, meta) if meta else None for key, meta in zip(keys, rows, strict=True)
        ]

    async def _list(self, key: SessionKey, now: datetime) -> None:
        """Update the owner's list; the turn is saved already, so a failure only delays it."""
        try:
            with redis_errors("list the session"):
                await self._index.touch(key, now)
        except UpstreamUnavailable as exc:
            _log.warning("session not listed until its next turn", error=exc.message)

    def _check_room(self, info: SessionInfo) -> None:
        limits = self._limits
        for name, value, limit in (
            ("turns", info.num_turns, limits.max_turns),
            ("bytes", info.num_bytes, limits.max_session_bytes),
        ):
            if value >= limit:
                raise SessionFull(
                    f"session {info.key.session_id!r} holds {value} {name}, the limit is {limit}; "
                    "begin another session"
                )


def _meta_key(key: SessionKey) -> str:
    return f"specrag:session:{key.hash_tag()}:meta"


def _turns_key(key: SessionKey) -> str:
    return f"specrag:session:{key.hash_tag()}:turns"


def _not_found(key: SessionKey) -> NotFound:
    return NotFound(f"no session {key.session_id!r}", reason="SESSION_NOT_FOUND")


def _read_info(key: SessionKey, meta: dict[bytes, bytes]) -> SessionInfo:
    try:
        return SessionInfo(
            key=key,
            collection=meta[b"collection"].decode(),
            version=int(meta[b"version"]),
            next_passage_number=int(meta[b"next_passage_number"]),
            num_turns=int(meta[b"num_turns"]),
            num_bytes=int(meta[b"num_bytes"]),
            created_at=datetime.fromisoformat(meta[b"created_at"].decode()),
            updated_at=datetime.fromisoformat(meta[b"updated_at"].decode()),
        )
    except (KeyError, ValueError) as exc:
        raise DataLoss(f"the record of session {key.session_id!r} is damaged: {exc}") from exc


def _read_turns(key: SessionKey, rows: Sequence[bytes]) -> tuple[Turn, ...]:
    try:
        return tuple(_TURN.validate_json(row) for row in rows)
    except ValidationError as exc:
        raise DataLoss(
            f"a turn of session {key.session_id!r} is damaged: {exc.error_count()} faults"
        ) from exc
