"""The connection to Milvus: made when first needed, closed once, and what the server can do."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pymilvus import AsyncMilvusClient, MilvusClient
from pymilvus.exceptions import MilvusException
from specrag_common.runtime.logs import get_logger

from specrag_retriever.catalogue import encode_info
from specrag_retriever.milvus_calls import PROBE_TIMEOUT_S, WRITE_TIMEOUT_S, guarded
from specrag_retriever.milvus_schema import build_indexes, build_schema

if TYPE_CHECKING:
    from specrag_retriever.catalogue import CollectionInfo

_VERSION: Final = re.compile(r"(\d+)\.(\d+)")
_LITE: Final = re.compile(r"milvus.?lite", re.I)
_FIRST_WITH_LEXICAL: Final = (2, 5)

_CHANNEL_OPTIONS: Final = {
    # A restarted server is found again within two seconds, not two minutes.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 2_000,  # time for one attempt
    "grpc.max_reconnect_backoff_ms": 2_000,
    "grpc.use_local_subchannel_pool": 1,  # or a fresh channel waits out the old one's back-off
    # Idle connections are not pinged: servers end those that ping more often than they allow.
    "grpc.keepalive_time_ms": 30_000,
    "grpc.keepalive_permit_without_calls": 0,
}

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAbilities:
    """What the connected server can do.

    Attributes:
        version: as it says.
        has_lexical: BM25 functions and hybrid search; without them search is by vectors only.
        flush_is_cheap: Milvus Lite: flushing keeps its log small and search fast. Other servers
            flush by themselves and limit the rate.
    """

    version: str
    has_lexical: bool
    flush_is_cheap: bool


def abilities_of(version: str) -> ServerAbilities:
    """Tell a server's abilities by the version it reports."""
    is_lite = _LITE.search(version) is not None  # not "v2.3.5-lite", a packaged server
    numbers = _VERSION.search(version)
    is_recent = numbers is None or (int(numbers[1]), int(numbers[2])) >= _FIRST_WITH_LEXICAL
    return ServerAbilities(
        version=version, has_lexical=is_lite or is_recent, flush_is_cheap=is_lite
    )


class MilvusConnection:
    """Owns the client; constructing it connects to nothing and needs no event loop."""

    def __init__(self, uri: str, token: str = "") -> None:
        """Remember where Milvus is."""
        self._uri = uri
        self._token = token
        self._client: AsyncMilvusClient | None = None
        self._abilities: ServerAbilities | None = None

    @property
    def uri(self) -> str:
        """Return the address."""
        return self._uri

    @property
    def client(self) -> Any:
        """Return the async client of the running loop; it connects at its first call."""
        if self._client is None:
            self._client = AsyncMilvusClient(
                uri=self._uri,
                token=self._token,
                timeout=PROBE_TIMEOUT_S,
                dedicated=True,
                grpc_options=_CHANNEL_OPTIONS,
            )
        return self._client

    async def abilities(self) -> ServerAbilities:
        """Return what the server can do; asked once, then remembered."""
        if self._abilities is None:
            version = str(await guarded(self.client.get_server_version(), "get version"))
            self._abilities = abilities_of(version)
            if not self._abilities.has_lexical:
                _log.warning(
                    "milvus has no BM25 or hybrid search: new collections are searched by "
                    "vectors only",
                    version=version,
                )
        return self._abilities

    async def probe(self) -> None:
        """Return if the server answers.

        Raises:
            UpstreamUnavailable: it does not.
        """
        await guarded(self.client.get_server_version(), "probe", PROBE_TIMEOUT_S)

    async def load_collection(self, milvus_name: str) -> None:
        """Make a collection searchable that its server holds on disk only, as after a restart."""
        _log.info("loading a collection", name=milvus_name)
        await guarded(self.client.load_collection(milvus_name), "load collection", WRITE_TIMEOUT_S)

    async def create_collection(self, info: CollectionInfo) -> None:
        """Create and load a collection with its indexes.

        In a thread, with the synchronous client: Milvus Lite refuses to make an index for the
        asynchronous one.
        """
        await guarded(asyncio.to_thread(self._create, info), "create collection", WRITE_TIMEOUT_S)

    async def close(self) -> None:
        """Close the connection; a later call would open another one."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _create(self, info: CollectionInfo) -> None:
        client = MilvusClient(
            uri=self._uri,
            token=self._token,
            timeout=PROBE_TIMEOUT_S,
            dedicated=True,
            grpc_options=_CHANNEL_OPTIONS,
        )
        try:
            _create_whole(client, info)
        finally:
            client.close()


def _create_whole(client: Any, info: CollectionInfo) -> None:
    """Create the collection with indexes, loaded; if that fails half-way, leave nothing."""
    _, properties = encode_info(info)
    try:
        client.create_collection(
            info.milvus_name,
            schema=build_schema(info),
            index_params=build_indexes(info),
            properties=properties,
            consistency_level="Strong",
            timeout=WRITE_TIMEOUT_S,
        )
    except MilvusException:
        with contextlib.suppress(MilvusException):
            client.drop_collection(info.milvus_name, timeout=PROBE_TIMEOUT_S)
        raise
