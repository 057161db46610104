"""One turn at a time: a lease on each session, with a fencing token and a heartbeat.

The token rises with every acquisition, also after a deletion or an expiry (it is never below the
server's clock in microseconds), and every write names it: a holder that lost its lease without
noticing cannot write over its successor.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Final, Self

from specrag_common.runtime.errors import SessionBusy, UpstreamUnavailable
from specrag_common.runtime.logs import get_logger
from specrag_common.sessions.redis_client import redis_errors

if TYPE_CHECKING:
    from types import TracebackType

    from redis.asyncio import Redis

    from specrag_common.sessions.model import SessionKey

RETRY_HINT_S: Final = 1.0
"""What a busy session tells the caller to wait; the holder's turn may end any time."""

_ACQUIRE: Final = """
local held = redis.call('GET', KEYS[1])
if held then
  local token, nonce = held:match('^(%d+):(.+)$')
  if nonce == ARGV[1] then return {1, token} end
  return {0, ''}
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
local token = string.format('%.0f', math.max(now, last + 1))
redis.call('SET', KEYS[2], token, 'PX', ARGV[3])
redis.call('SET', KEYS[1], token .. ':' .. ARGV[1], 'PX', ARGV[2])
return {1, token}
"""

_RENEW: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

_RELEASE: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""

_FENCE_TTL_MS: Final = 24 * 3600 * 1000

_log = get_logger(__name__)


def lease_key(key: SessionKey) -> str:
    """Return the Redis key that holds ``token:nonce`` while a turn runs."""
    return f"specrag:session:{key.hash_tag()}:lease"


def fence_key(key: SessionKey) -> str:
    """Return the Redis key of the highest token given out."""
    return f"specrag:session:{key.hash_tag()}:fence"


class SessionLeases:
    """Gives out the leases of all sessions of one store."""

    def __init__(self, client: Redis, *, ttl_s: float = 15.0) -> None:
        """Use ``client``, which stays the caller's.

        Args:
            client: the turn log's store.
            ttl_s: how long a lease outlives its holder; it is renewed three times as often.
        """
        self._client = client
        self._ttl_s = ttl_s
        self._acquire = client.register_script(_ACQUIRE)

    async def acquire(self, key: SessionKey) -> SessionLease:
        """Take the lease; use it as ``async with await leases.acquire(key) as lease``.

        Raises:
            SessionBusy: another turn holds it.
            UpstreamUnavailable: the store does not answer.
        """
        nonce = uuid.uuid4().hex
        with redis_errors("take the session's lease"):
            taken, token = await self._acquire(
                keys=[lease_key(key), fence_key(key)],
                args=[nonce, int(self._ttl_s * 1000), _FENCE_TTL_MS],
            )
        if not taken:
            raise SessionBusy(
                f"session {key.session_id!r} is answering another request",
                retry_delay_s=RETRY_HINT_S,
            )
        return SessionLease(self._client, key, token=int(token), nonce=nonce, ttl_s=self._ttl_s)


class SessionLease:
    """A held lease; its heartbeat runs until :meth:`release`. Made by :class:`SessionLeases`."""

    def __init__(
        self, client: Redis, key: SessionKey, *, token: int, nonce: str, ttl_s: float
    ) -> None:
        """Start the heartbeat of a lease that was just taken."""
        self.key = key
        self.token = token
        self._value = f"{token}:{nonce}"
        self._ttl_s = ttl_s
        self._renew = client.register_script(_RENEW)
        self._release = client.register_script(_RELEASE)
        self._lost = asyncio.Event()
        self._heartbeat = asyncio.create_task(self._beat())

    @property
    def is_lost(self) -> bool:
        """Whether another holder may have taken over."""
        return self._lost.is_set()

    async def wait_lost(self) -> None:
        """Return when the lease is lost; a turn may stop early then."""
        await self._lost.wait()

    def raise_if_lost(self) -> None:
        """Raise when the lease is lost.

        Raises:
            SessionBusy: it is.
        """
        if self.is_lost:
            raise SessionBusy(
                f"session {self.key.session_id!r} was taken over by another request",
                retry_delay_s=RETRY_HINT_S,
            )

    async def release(self) -> None:
        """Give the lease back if it is still ours; never raises for a store that is gone."""
        self._heartbeat.cancel()
        await asyncio.wait({self._heartbeat})
        try:
            with redis_errors("release the session's lease"):
                await self._release(keys=[lease_key(self.key)], args=[self._value])
        except UpstreamUnavailable as exc:
            _log.warning("lease left to expire", error=exc.message)

    async def _beat(self) -> None:
        """Renew the lease until it is lost: taken by another, or not renewed for its whole life."""
        loop = asyncio.get_running_loop()
        expires = loop.time() + self._ttl_s
        while loop.time() < expires:
            await asyncio.sleep(self._ttl_s / 3)
            sent = loop.time()
            try:
                async with asyncio.timeout_at(expires):
                    with redis_errors("renew the session's lease"):
                        renewed = await self._renew(
                            keys=[lease_key(self.key)],
                            args=[self._value, int(self._ttl_s * 1000)],
                        )
            except (UpstreamUnavailable, TimeoutError):
                continue
            if not renewed:
                break
            expires = sent + self._ttl_s
        _log.warning("session lease lost", token=self.token)
        self._lost.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        # A task of its own: a second cancel must not leave the session locked.
        await asyncio.shield(asyncio.create_task(self.release()))
