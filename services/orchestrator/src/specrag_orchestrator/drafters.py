"""The drafters this service may use, and which of them are usable right now.

Each has a watch: it shakes hands, then waits until the connection breaks (or the drafter reports
NOT_SERVING) and shakes hands again, with growing pauses while nobody answers. A request never
waits for an unreachable drafter longer than a short, fixed time, and not at all once it is known
to be down.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import grpc
from specrag.v1 import drafter_pb2, drafter_pb2_grpc
from specrag_common.runtime.channels import open_channel
from specrag_common.runtime.errors import SpecragError
from specrag_common.runtime.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag.v1 import common_pb2
    from specrag_common.runtime.client_calls import ServiceChannel

SERVICE: Final = "specrag.v1.DrafterService"
_HANDSHAKE_TIMEOUT_S: Final = 2.0
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 3.0

_log = get_logger(__name__)


class Drafter:
    """One drafter: its address, its stub and what is known of it."""

    def __init__(self, index: int, address: str, channel: ServiceChannel) -> None:
        """Know nothing yet; :meth:`watch` finds out."""
        self.index = index
        self.address = address
        self.stub: drafter_pb2_grpc.DrafterServiceAsyncStub = drafter_pb2_grpc.DrafterServiceStub(
            channel
        )
        self._channel = channel
        self._settled = asyncio.Event()
        self.info: common_pb2.ModelInfo | None = None
        """The handshake; ``None`` while the drafter is not usable."""
        self.problem = "not reached yet"
        """Why it is not usable, in words."""

    @property
    def name(self) -> str:
        """What callers see, for example ``drafter-1``."""
        return f"drafter-{self.index}"

    @property
    def is_settled(self) -> bool:
        """Whether it is known if the drafter is usable."""
        return self._settled.is_set()

    @property
    def is_usable(self) -> bool:
        """Whether the last handshake succeeded and the connection has held since."""
        return self.is_settled and self.info is not None

    async def wait_settled(self) -> None:
        """Return once it is known whether the drafter is usable."""
        await self._settled.wait()

    async def watch(self) -> None:
        """Keep :attr:`info` true until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            if await self._shake_hands():
                pause_s = _FIRST_PAUSE_S
                await self._wait_disconnected()
                self._settled.clear()
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def _shake_hands(self) -> bool:
        try:
            request = drafter_pb2.DrafterServiceGetModelInfoRequest()
            response = await self.stub.GetModelInfo(request, timeout=_HANDSHAKE_TIMEOUT_S)
        except SpecragError as exc:
            if not self.is_settled:
                _log.warning("drafter not usable", drafter=self.name, error=exc.message)
            self.info, self.problem = None, exc.message
            self._settled.set()
            return False
        _log.info("drafter usable", drafter=self.name, model=response.model.model_id)
        self.info, self.problem = response.model, ""
        self._settled.set()
        return True

    async def _wait_disconnected(self) -> None:
        state = self._channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(state)
        else:
            await asyncio.sleep(_FIRST_PAUSE_S)


class DrafterPool:
    """All configured drafters; their order gives each its index."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """Open the channels; nothing is called before :meth:`start`."""
        self.drafters = tuple(
            Drafter(index, address, open_channel(address, health_service=SERVICE))
            for index, address in enumerate(addresses)
        )
        self._watches: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to watch every drafter."""
        self._watches = [asyncio.create_task(drafter.watch()) for drafter in self.drafters]

    async def settle(self, timeout_s: float) -> None:
        """Wait until every drafter's state is known, at most ``timeout_s``."""
        unknown = [one for one in self.drafters if not one.is_settled]
        if unknown:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await asyncio.gather(*(one.wait_settled() for one in unknown))

    async def close(self) -> None:
        """Stop watching and close the channels."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for drafter in self.drafters:
            await drafter.close()
