"""Which sessions an owner has, by last change. Lags behind a crash and heals itself."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from specrag_common.runtime.errors import InvalidRequest
from specrag_common.sessions.model import SessionKey

if TYPE_CHECKING:
    from datetime import datetime

    from redis.asyncio import Redis

_BATCH: Final = 64


class IndexEntry(NamedTuple):
    """One session and the milliseconds since the epoch of its last turn."""

    updated_ms: int
    session_id: str

    def page_token(self) -> str:
        """Return a token that asks for what follows this entry."""
        raw = f"{self.updated_ms}:{self.session_id}".encode()
        return base64.urlsafe_b64encode(raw).decode()

    @classmethod
    def of_page_token(cls, token: str) -> IndexEntry:
        """Read a token back.

        Raises:
            InvalidRequest: it is none of ours.
        """
        try:
            raw = base64.b64decode(token, altchars=b"-_", validate=True).decode()
            updated_ms, separator, session_id = raw.partition(":")
            if separator:
                return cls(int(updated_ms), session_id)
        except (ValueError, binascii.Error):
            pass
        raise InvalidRequest("page_token", "is not a token of an earlier page")


class SessionIndex:
    """A sorted set per owner. Raises the Redis client's own errors."""

    def __init__(self, client: Redis, *, ttl_s: int) -> None:
        """Entries older than ``ttl_s`` are dropped, as their sessions expire then."""
        self._client = client
        self._ttl_s = ttl_s

    async def touch(self, key: SessionKey, updated_at: datetime) -> None:
        """Put the session at the top of its owner's list."""
        name = _index_key(key.tenant, key.subject)
        now_ms = int(updated_at.timestamp() * 1000)
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.zadd(name, {key.session_id: now_ms})
            pipe.zremrangebyscore(name, 0, now_ms - self._ttl_s * 1000)
            pipe.expire(name, self._ttl_s)
            await pipe.execute()

    async def remove(self, keys: list[SessionKey]) -> None:
        """Drop sessions of one owner that are gone."""
        if keys:
            name = _index_key(keys[0].tenant, keys[0].subject)
            await self._client.zrem(name, *(key.session_id for key in keys))

    async def following(
        self, tenant: str, subject: str, after: IndexEntry | None, limit: int
    ) -> list[IndexEntry]:
        """Return up to ``limit`` entries after ``after``, the last changed first."""
        found: list[IndexEntry] = []
        top = "+inf" if after is None else str(after.updated_ms)
        offset = 0
        while True:
            rows: Any = await self._client.zrange(
                _index_key(tenant, subject),
                top,
                "-inf",
                desc=True,
                byscore=True,
                offset=offset,
                num=_BATCH,
                withscores=True,
            )
            for member, score in rows:
                entry = IndexEntry(int(score), member.decode())
                if after is None or entry < after:
                    found.append(entry)
                if len(found) == limit:
                    return found
            if len(rows) < _BATCH:
                return found
            offset += _BATCH


def _index_key(tenant: str, subject: str) -> str:
    owner = SessionKey(tenant=tenant, subject=subject, session_id="-")
    return f"specrag:sessions:{owner.owner_tag()}"
