"""What an answer looks like on a terminal: the byte stream, played on a small screen."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from specrag.v1 import rag_pb2
from specrag_client import Commit, Retract, Speculative
from specrag_client.cli.terminal_view import TerminalView
from specrag_client.convert import to_event
from specrag_common.runtime.errors import UpstreamUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from specrag_client.events import AnswerEvent

    from tests.client.conftest import RagScript

SEQUENCE = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])")


class Screen:
    """Understands what the view sends: text, colours, cursor up, erase line, line feed."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[str, bool]]] = [[]]
        self._row = 0
        self._column = 0
        self._dim = False

    def feed(self, stream: str) -> None:
        position = 0
        while position < len(stream):
            match = SEQUENCE.match(stream, position)
            if match:
                self._control(match[1], match[2])
                position = match.end()
            else:
                self._put(stream[position])
                position += 1

    def _control(self, parameters: str, kind: str) -> None:
        if kind == "A":
            self._row -= int(parameters or 1)
            assert self._row >= 0, "the cursor left the screen's top"
        elif kind == "K":
            self.rows[self._row] = []
        elif kind == "m":
            codes = parameters.split(";")
            if "2" in codes:
                self._dim = True
            elif codes == ["0"]:
                self._dim = False
        else:
            assert kind in "hl", f"unexpected control {kind}"

    def _put(self, character: str) -> None:
        if character == "\n":
            self._row += 1
            self._column = 0
            if self._row == len(self.rows):
                self.rows.append([])
        elif character == "\r":
            self._column = 0
        else:
            row = self.rows[self._row]
            row[self._column : self._column + 1] = [(character, self._dim)]
            self._column += 1

    def text(self) -> str:
        return "\n".join("".join(one for one, _ in row).rstrip() for row in self.rows).rstrip()

    def dim_text(self) -> str:
        return "".join(one for row in self.rows for one, dim in row if dim)


class Terminal:
    """A view on a console whose output can be looked at after each event."""

    def __init__(self, width: int = 30, height: int = 10) -> None:
        self._stream = io.StringIO()
        console = Console(
            file=self._stream,
            force_terminal=True,
            width=width,
            height=height,
            color_system="standard",
            highlight=False,
            legacy_windows=False,
            _environ={},
        )
        self.view = TerminalView(console)

    @property
    def screen(self) -> Screen:
        screen = Screen()
        screen.feed(self._stream.getvalue())
        return screen


def test_speculative_text_is_dim_and_committed_text_is_not() -> None:
    terminal = Terminal()
    with terminal.view as view:
        view.show(Speculative(seq=1, offset=0, text="The cat sat"))
        assert terminal.screen.dim_text() == "The cat sat"
        view.show(Commit(seq=2, to_offset=7, text="The cat"))
        assert terminal.screen.text() == "The cat sat"
        assert terminal.screen.dim_text() == " sat"


def test_retracted_text_disappears() -> None:
    terminal = Terminal()
    with terminal.view as view:
        view.show(Speculative(seq=1, offset=0, text="The dog sleeps on a mat that is far away"))
        assert "far away" in terminal.screen.text()
        view.show(Retract(seq=2, to_offset=4))
        assert terminal.screen.text() == "The"
        view.show(Commit(seq=3, to_offset=7, text="The cat"))
        assert terminal.screen.text() == "The cat"


@pytest.mark.parametrize("width", [4, 12, 30, 80])
@pytest.mark.parametrize("height", [3, 10])
def test_every_event_leaves_exactly_the_shown_text(width: int, height: int) -> None:
    terminal = Terminal(width, height)
    words = ["Leave", "is", "approved", "猫が好き🐟", "and", "https://example.org/a/path", "Leith."]
    position = 0
    with terminal.view as view:
        for seq, word in enumerate(words * 3, start=1):
            view.show(Speculative(seq=seq, offset=position, text=word[:2] + "?? wrong"))
            view.show(Retract(seq=seq, to_offset=position + len(word[:2])))
            text = word + " "
            position += len(text)
            view.show(Commit(seq=seq, to_offset=position, text=text))
            assert "wrong" not in terminal.screen.text()
    said = "".join(terminal.screen.text().split())
    assert said == "".join("".join(words * 3).split())


def test_leaving_early_drops_what_was_only_speculative() -> None:
    terminal = Terminal()

    def break_off() -> None:
        with terminal.view as view:
            view.show(Commit(seq=1, to_offset=3, text="The"))
            view.show(Speculative(seq=2, offset=3, text=" cat"))
            raise UpstreamUnavailable("gone")

    with pytest.raises(UpstreamUnavailable):
        break_off()
    assert terminal.screen.text() == "The"


def test_finished_answer_is_followed_by_sources_and_stats(rag_script: RagScript) -> None:
    terminal = Terminal(width=100)
    _play(terminal, rag_script.events)
    lines = terminal.screen.text().splitlines()
    assert lines[0] == "猫が🐟を食べる"
    assert lines[2] == "[1] Annual leave — leave.md “猫が🐟を食べる”"
    assert lines[3].startswith("joint (coupled) · 3 tokens in 0.1 s")
    assert "accepted 1 of 4 draft tokens, 1.50 tokens a round" in terminal.screen.text()
    assert "trace " + "ab" * 16 in terminal.screen.text()


def test_degradation_and_dropped_passages_are_said(
    rag_script: RagScript, make_finished: Callable[..., rag_pb2.AnswerEvent]
) -> None:
    lost = rag_pb2.Degradation(component="drafter-1", reason="UNAVAILABLE", detail="gone")
    rag_script.events[0].retrieval_done.num_dropped_passages = 2
    rag_script.events[-1] = make_finished(9, "猫が🐟を食べる", degraded=[lost])
    terminal = Terminal(width=100)
    _play(terminal, rag_script.events)
    assert "2 passages did not fit into the model's context" in terminal.screen.text()
    assert "degraded: drafter-1 UNAVAILABLE: gone" in terminal.screen.text()


def test_answer_without_any_passage_says_so(rag_script: RagScript) -> None:
    del rag_script.events[0].retrieval_done.passages[:]
    terminal = Terminal(width=100)
    _play(terminal, rag_script.events)
    assert "no passage was found" in terminal.screen.text()


def test_escape_sequences_of_the_model_are_shown_not_obeyed() -> None:
    terminal = Terminal()
    with terminal.view as view:
        view.show(Commit(seq=1, to_offset=13, text="a\x1b[2Jb [red]c"))
    assert terminal.screen.text() == "a\ufffd[2Jb [red]c"


def _play(terminal: Terminal, events: list[rag_pb2.AnswerEvent]) -> None:
    with terminal.view as view:
        for wire in events:
            event: AnswerEvent | None = to_event(wire)
            assert event is not None
            view.show(event)
