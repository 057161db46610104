"""Rebuilding an answer's text from the lines that ``ask --events`` prints."""

from __future__ import annotations

from typing import Any

from specrag_client import AnswerText


def rebuild(events: list[dict[str, Any]]) -> str:
    """Return the committed text; every piece of speculation must be settled by then."""
    text = AnswerText()
    for event in events:
        match event["type"]:
            case "speculative":
                text.append(event["offset"], event["text"])
            case "retract":
                text.retract(event["to_offset"])
            case "commit":
                text.commit(event["to_offset"], event["text"])
    assert text.speculative == ""
    return text.committed
