"""One way to speak to an engine, whether it is in this process or in one of its own."""

from __future__ import annotations

import multiprocessing
import time
from typing import TYPE_CHECKING, Any, Protocol

import psutil
from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.messages import (
    EngineReply,
    FreeSequence,
    OpenSequence,
    RoundVerified,
    SequenceOpened,
    StatsRequest,
    VerifyTree,
)
from specrag_inference.serve import run_engine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specrag_inference.engine import Engine
    from specrag_inference.messages import EngineCommand
    from specrag_inference.plan import EnginePlan

START_S = 90.0
REPLY_S = 30.0


class EngineLink(Protocol):
    """Takes commands, gives events."""

    def submit(self, *commands: EngineCommand) -> None: ...

    def events(self) -> Sequence[Any]: ...


class LocalLink:
    """An engine of this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def submit(self, *commands: EngineCommand) -> None:
        for command in commands:
            self.engine.submit(command)

    def events(self) -> Sequence[Any]:
        assert self.engine.has_work, "nothing more will come"
        return self.engine.step()


class ProcessLink:
    """An engine in a process of its own, with the further ranks it starts."""

    def __init__(self, plan: EnginePlan) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=run_engine, args=(theirs, plan))
        self.process.start()
        theirs.close()
        self.first = self.receive(START_S)

    def submit(self, *commands: EngineCommand) -> None:
        self.connection.send(commands)

    def events(self) -> Sequence[Any]:
        reply = self.receive()
        assert isinstance(reply, tuple), reply
        return reply

    def receive(self, timeout_s: float = REPLY_S) -> EngineReply:
        assert self.connection.poll(timeout_s), "the engine process does not answer"
        reply: EngineReply = self.connection.recv()
        return reply

    def receive_last(self, timeout_s: float = REPLY_S) -> Any:
        """Return the last message before the connection ends."""
        give_up = time.monotonic() + timeout_s
        last = None
        try:
            while True:
                last = self.receive(give_up - time.monotonic())
        except (EOFError, ConnectionResetError):
            return last

    def stats(self) -> Any:
        self.connection.send(StatsRequest())
        return self.receive()

    def find_ranks(self) -> list[psutil.Process]:
        """Return the follower processes, in the order of their ranks."""
        children = psutil.Process(self.process.pid).children()
        return sorted(
            (child for child in children if "resource_tracker" not in " ".join(child.cmdline())),
            key=lambda child: child.pid,
        )

    def stop(self) -> int | None:
        """End the process and return its exit code."""
        self.connection.send(None)
        self.process.join(REPLY_S)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join(REPLY_S)


def answer_all(
    link: EngineLink,
    openings: Sequence[OpenSequence],
    trees: Mapping[str, Sequence[TokenTree]] | None = None,
) -> dict[str, list[int]]:
    """Run all sequences to their end, side by side; return their tokens.

    Args:
        link: the engine.
        openings: the sequences.
        trees: what is verified for each of them, round by round; then the target decodes alone.
    """
    waiting = {name: list(rounds) for name, rounds in (trees or {}).items()}
    tokens: dict[str, list[int]] = {opening.sequence_id: [] for opening in openings}
    num_rounds = dict.fromkeys(tokens, 0)
    unfinished = set(tokens)

    def ask(name: str) -> None:
        tree = waiting[name].pop(0) if waiting.get(name) else None
        link.submit(
            VerifyTree(
                sequence_id=name,
                round=num_rounds[name],
                tree=TokenTree.empty() if tree is None else tree,
                free_run_tokens=10_000 if tree is None else 0,
            )
        )
        num_rounds[name] += 1

    link.submit(*openings)
    while unfinished:
        for event in link.events():
            name = event.sequence_id
            if isinstance(event, SequenceOpened):
                ask(name)
                continue
            assert isinstance(event, RoundVerified), event
            tokens[name] += [token.token_id for token in event.tokens]
            if event.finish_reason is not None:
                unfinished.discard(name)
                link.submit(FreeSequence(sequence_id=name))
            elif event.last:
                ask(name)
    return tokens
