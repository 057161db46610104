"""Ours, as users get it: the local stack, asked through ``RagService`` with suffix drafters.

Usage: python -m bench.peers.mesh_child --directory FOLDER

A request carries ``question`` and ``passages`` and names its ``policy``. Tokens that would end the
answer before ``max_tokens`` are ruled out.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from specrag.v1 import common_pb2, rag_pb2, rag_pb2_grpc
from specrag_client.stack.launcher import StackLauncher
from specrag_client.stack.options import StackOptions
from specrag_common.runtime.channels import open_channel

from bench.peers.child import Answer, Stopwatch, serve

if TYPE_CHECKING:
    from collections.abc import Callable

POLICIES = {
    "target_only": rag_pb2.ANSWER_POLICY_TARGET_ONLY,
    "joint": rag_pb2.ANSWER_POLICY_JOINT,
}
TIMEOUT_S = 300

UNKNOWN_TOKEN = -1
"""Stands for a commit: events carry text, ``Finished`` the tokens."""


async def ask(endpoint: str, request: dict[str, Any]) -> Answer:
    """Ask once, greedily.

    First token and total are the caller's times; decoding is what the service reports: all tokens,
    from the end of the prefill.
    """
    async with open_channel(endpoint) as channel:
        stub = rag_pb2_grpc.RagServiceStub(channel)
        watch = Stopwatch()
        message = rag_pb2.AnswerRequest(
            question=request["question"],
            policy=POLICIES[request.get("policy", "joint")],
            sampling=common_pb2.SamplingParams(
                temperature=0.0,
                max_tokens=request["max_tokens"],
                min_tokens=request["max_tokens"],
            ),
            passages=[common_pb2.Passage(**passage) for passage in request["passages"]],
        )
        finished = None
        async for response in stub.Answer(message, timeout=TIMEOUT_S):
            event = response.event
            if event.HasField("commit"):
                watch.note([UNKNOWN_TOKEN])
            elif event.HasField("finished"):
                finished = event.finished
        answer = watch.stop()
        assert finished is not None, "the stream ended without Finished"
        token_ids = np.frombuffer(finished.token_ids, dtype="<i4").tolist()
    return Answer(
        token_ids=token_ids,
        first_token_s=answer.first_token_s,
        decode_tokens_per_s=len(token_ids) / (finished.stats.decode_ms / 1000),
        total_s=answer.total_s,
        num_rounds=finished.stats.rounds,
    )


def main() -> None:
    """Start the stack, serve, stop it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    arguments = parser.parse_args()
    options = StackOptions(directory=arguments.directory, foreground=True)
    launcher = StackLauncher(options, print)
    with asyncio.Runner() as runner:

        def load() -> Callable[[dict[str, Any]], Answer]:
            record = runner.run(launcher.start())
            return lambda request: runner.run(ask(record.endpoint, request))

        try:
            serve(load)
        finally:
            runner.run(launcher.stop())


if __name__ == "__main__":
    main()
