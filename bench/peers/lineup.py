"""Which peers take part, and how each is started."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.peers.process import PeerProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.peers.prompts import RagPrompt

REPOSITORY = Path(__file__).parents[2]

LOOKUP_TOKENS = 8
"""Draft tokens a step of the peers that look up the prompt; ours has the same limit."""

VLLM_MODES = ("vllm", "vllm-ngram")
OUR_MODES = ("ours-alone", "ours-joint", "ours-mesh")
BF16_PEERS = ("generate", "lookup", *VLLM_MODES, "ours-alone", "ours-joint")
ALL_PEERS = ("generate", "lookup", *VLLM_MODES, "llama", *OUR_MODES)

_VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LineupOptions:
    """Where the peers' programs and files are.

    Attributes:
        folder: the converted model: config, bf16 safetensors, tokenizer.
        gguf: the file it was converted from.
        reference: the model reference of our engine.
        cache_dir: our converted models.
        threads: of every peer.
        vllm_python: interpreter with vllm-cpu.
        llama_python: interpreter with xllamacpp.
        logs: folder for the peers' stderr.
        dtype: precision of our engine.
    """

    folder: Path
    gguf: Path
    reference: str
    cache_dir: Path
    threads: int
    vllm_python: str
    llama_python: str
    logs: Path
    dtype: str = "bf16"


class Lineup:
    """Starts peers; two modes that are one program share its process."""

    def __init__(self, options: LineupOptions) -> None:
        """Start nothing yet."""
        self._options = options
        self._processes: dict[str, PeerProcess] = {}
        options.logs.mkdir(parents=True, exist_ok=True)

    def start(self, peers: Sequence[str]) -> None:
        """Start the processes of these peers one after the other and wait for each."""
        for name in dict.fromkeys(map(_get_process_name, peers)):
            process = self._start_process(name)
            self._processes[name] = process
            process.wait_ready()
            print(f"{name}: loaded in {process.load_s:.0f} s", flush=True)

    def get(self, peer: str) -> PeerProcess:
        """Return the process that answers for a peer."""
        return self._processes[_get_process_name(peer)]

    def stop(self) -> None:
        """End all of them."""
        for process in self._processes.values():
            process.close()

    def _start_process(self, name: str) -> PeerProcess:
        options = self._options
        environment = dict(os.environ)  # noqa: TID251 - handed to child processes
        environment["OMP_NUM_THREADS"] = str(options.threads)
        if name in VLLM_MODES:
            environment |= _VLLM_ENVIRONMENT
        return PeerProcess(
            name,
            self._build_command(name),
            log=options.logs / f"{name}.log",
            environment=environment,
            working_directory=REPOSITORY,
            can_be_halted=name != "ours-mesh",
        )

    def _build_command(self, name: str) -> list[str]:
        options = self._options
        folder, threads = str(options.folder), ["--threads", str(options.threads)]
        ours = [sys.executable, "-m"]
        match name:
            case "vllm":
                return [options.vllm_python, "-m", "bench.peers.vllm_child", folder]
            case "vllm-ngram":
                ngram = ["--ngram", str(LOOKUP_TOKENS)]
                return [options.vllm_python, "-m", "bench.peers.vllm_child", folder, *ngram]
            case "llama":
                gguf = str(options.gguf)
                return [options.llama_python, "-m", "bench.peers.llama_child", gguf, *threads]
            case "generate":
                return [*ours, "bench.peers.transformers_child", folder, *threads]
            case "ours-mesh":
                directory = str(options.logs / "mesh")
                return [*ours, "bench.peers.mesh_child", "--directory", directory]
            case _:
                cache = ["--cache-dir", str(options.cache_dir), "--dtype", options.dtype]
                command = [*ours, "bench.peers.engine_child", options.reference]
                return [*command, *threads, *cache]


def build_request(peer: str, prompt: RagPrompt, *, max_tokens: int) -> dict[str, Any]:
    """Return what a peer is asked."""
    request: dict[str, Any] = {"prompt_ids": prompt.token_ids, "max_tokens": max_tokens}
    if peer == "lookup":
        request["lookup_tokens"] = LOOKUP_TOKENS
    elif peer == "ours-joint":
        request |= {"policy": "joint", "subset_ids": prompt.subset_ids}
    elif peer == "ours-mesh":
        request = {
            "max_tokens": max_tokens,
            "question": prompt.question.question,
            "passages": [
                {"chunk_id": one.chunk_id, "title": one.title, "text": one.text}
                for one in prompt.question.passages
            ],
        }
    return request


def _get_process_name(peer: str) -> str:
    """Return the peer whose process answers for this one too."""
    return {"lookup": "generate", "ours-joint": "ours-alone"}.get(peer, peer)
