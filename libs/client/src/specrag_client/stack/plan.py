"""What a local stack runs: names, commands and environments. Pure: nothing is started here."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from specrag_client.proxies import loopback_exemption
from specrag_client.stack.options import UserFolders

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specrag_client.stack.layout import StackFolder
    from specrag_client.stack.options import StackOptions

SERVICE_NAMES: Final[Mapping[str, str]] = {
    "orchestrator": "specrag.v1.RagService",
    "retriever": "specrag.v1.RetrieverService",
    "verifier": "specrag.v1.VerifierService",
    "drafter": "specrag.v1.DrafterService",
}
"""Health service name by kind of process."""

_NUM_PASSAGES_OF_BUNDLED_TARGET: Final = "4"
"""With more passages the small bundled model mixes them up."""

_PASSAGE_TOKENS_OF_BUNDLED_TARGET: Final = "160"
"""It answers best from short passages; see the handbook's questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process to start."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]


def kind_of(process: str) -> str:
    """Return ``drafter`` for ``drafter-0`` and the name itself for all that exist once."""
    return process.rpartition("-")[0] if process.startswith("drafter-") else process


def drafter_names(options: StackOptions) -> list[str]:
    """Return the names of the drafter processes."""
    return [f"drafter-{index}" for index in range(options.num_drafters)]


class StackPlan:
    """Makes the process specs of one stack."""

    def __init__(self, options: StackOptions, folder: StackFolder, *, num_cores: int) -> None:
        """Plan for a machine on which ``num_cores`` cores may be used.

        The verifier may use all of them; the others are small beside it and get one each, so that
        they do not push each other off the cores while the target works.
        """
        self._options = options
        self._folder = folder
        self._verifier_threads = max(1, num_cores)

    def server(self, name: str, command: Sequence[str]) -> ProcessSpec:
        """Return the spec of Redis or Milvus."""
        return ProcessSpec(name=name, command=command, environment=self._inherited("", threads=1))

    def retriever(self, milvus_uri: str) -> ProcessSpec:
        """Return the retriever's spec; passages are measured in the target's tokens."""
        model = self._options.target_model
        short = {"MAX_PASSAGE_TOKENS": _PASSAGE_TOKENS_OF_BUNDLED_TARGET} if model is None else {}
        return self._service(
            "retriever",
            {"NUM_THREADS": "1", "MODEL_CACHE_DIR": self._model_cache(), **short},
            {
                "MILVUS_URI": milvus_uri,
                **({} if model is None else {"PASSAGE_TOKENIZER": model}),
            },
        )

    def verifier(self) -> ProcessSpec:
        """Return the verifier's spec."""
        model = self._options.target_model
        return self._service(
            "verifier",
            {"NUM_THREADS": str(self._verifier_threads), "MODEL_CACHE_DIR": self._model_cache()},
            {} if model is None else {"MODEL": model},
            threads=self._verifier_threads,
        )

    def drafter(self, name: str) -> ProcessSpec:
        """Return the spec of one drafter."""
        model = self._options.draft_model
        return self._service(
            name,
            {"NUM_THREADS": "1", "MODEL_CACHE_DIR": self._model_cache()},
            {} if model is None else {"MODEL": model},
        )

    def orchestrator(
        self, *, retriever: str, verifier: str, drafters: Sequence[str], redis_url: str
    ) -> ProcessSpec:
        """Return the orchestrator's spec."""
        is_bundled = self._options.target_model is None
        return self._service(
            "orchestrator",
            {"NUM_PASSAGES": _NUM_PASSAGES_OF_BUNDLED_TARGET} if is_bundled else {},
            {
                "RETRIEVER_ADDRESS": retriever,
                "VERIFIER_ADDRESS": verifier,
                "DRAFTER_ADDRESSES": ",".join(drafters),
                "REDIS_URL": redis_url,
            },
        )

    def _service(
        self,
        name: str,
        defaults: Mapping[str, str],
        fixed: Mapping[str, str],
        *,
        threads: int = 1,
    ) -> ProcessSpec:
        """Layer the settings: defaults, the caller's environment, what this stack decides."""
        kind = kind_of(name)
        prefix = f"SPECRAG_{kind.upper()}_"
        environment = self._inherited(prefix, threads=threads)
        for key, value in {"LOG_FORMAT": "console", **defaults}.items():
            environment.setdefault(prefix + key, value)
        decided = {
            **fixed,
            "HOST": "127.0.0.1",
            "PORT": "0",
            "PORT_FILE": str(self._folder.port_file(name)),
            "TRACE_FILE": str(self._folder.trace_file(name)),
            "DRAIN_GRACE_S": str(self._options.drain_grace_s),
            "DRAIN_NOTICE_S": "0",
            **self._options.settings.get(name, {}),
        }
        environment.update({prefix + key: value for key, value in decided.items()})
        command = [sys.executable, "-P", "-m", f"specrag_{kind}"]
        return ProcessSpec(name=name, command=command, environment=environment)

    def _inherited(self, prefix: str, *, threads: int) -> dict[str, str]:
        """Return the caller's variables without other services' settings."""
        kept = {
            key: value
            for key, value in self._options.environment.items()
            if not key.startswith("SPECRAG_") or (prefix and key.startswith(prefix))
        }
        threading = {
            "OMP_NUM_THREADS": str(threads),
            # Waiting threads sleep, since spinning ones take the cores from the other processes,
            # but not at once: waking between two small operations takes longer than they do.
            "OMP_WAIT_POLICY": "passive",
            "GOMP_SPINCOUNT": "10000",
            "TOKENIZERS_PARALLELISM": "false",
        }
        return kept | loopback_exemption(kept) | threading

    def _model_cache(self) -> str:
        return str(self._options.model_cache_dir or UserFolders().model_cache)
