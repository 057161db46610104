"""What the target reads for a question: the session's turns, append-only, and new passages.

A passage keeps its number for the whole session and is put into the prompt once; a later turn
refers to it by that number. Turns are never rewritten: the prompt of turn k + 1 begins with that of
turn k, unless the context is out, when the oldest turns leave whole and stay out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from specrag_common.conversation import Conversation, ConversationTurn, PromptPassage

from specrag_orchestrator.passages import SourcePassage

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from specrag_common.sessions.model import Session, Turn, TurnPassage

MAX_QUERY_CHARS: Final = 8192
NUM_QUERY_TURNS: Final = 2
"""Earlier questions that a follow-up's search takes along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is read for one question.

    Attributes:
        conversation: every turn with its passages; the last one is to be answered.
        found: what was found for the question, numbered, best first.
        earlier: other passages of the turns kept, by number.
        num_skipped_turns: oldest turns left out already.
        kept_turns: indices of the session's turns in the conversation, ascending.
        next_number: the first number that this reading has not used.
    """

    conversation: Conversation
    found: tuple[SourcePassage, ...]
    earlier: tuple[SourcePassage, ...]
    num_skipped_turns: int
    kept_turns: tuple[int, ...]
    next_number: int

    @property
    def passages(self) -> tuple[SourcePassage, ...]:
        """Everything in the context: found, best first, then earlier."""
        return self.found + self.earlier

    @property
    def new_numbers(self) -> frozenset[int]:
        """Numbers of the passages that enter the context with the question."""
        return frozenset(passage.number for passage in self.conversation.last.passages)

    def count_dropped_turns(self, num_dropped: int) -> int:
        """Return the oldest turns left out when the target drops ``num_dropped`` more."""
        if not num_dropped:
            return self.num_skipped_turns
        return self.kept_turns[min(num_dropped, len(self.kept_turns)) - 1] + 1

    def find_missing(self, kept: Collection[int]) -> frozenset[int]:
        """Return found passages that were to be referred to but left the context.

        Args:
            kept: numbers of the passages that the target reads.
        """
        numbers = frozenset(passage.number for passage in self.found)
        return numbers - self.new_numbers - frozenset(kept)


def build_query(question: str, session: Session | None) -> str:
    """Return what to search for: the question behind the last two questions of the session.

    A follow-up ("and who approves it?") names nothing by itself; the questions before it do.
    """
    earlier = [turn.question for turn in session.turns[-NUM_QUERY_TURNS:]] if session else []
    return "\n".join([*earlier, question])[-MAX_QUERY_CHARS:]


def compose_reading(
    question: str,
    found: Sequence[SourcePassage],
    session: Session | None,
    *,
    max_chars: int,
    num_skipped_turns: int | None = None,
) -> Reading:
    """Return what is to be read.

    Args:
        question: the question to answer.
        found: passages found for it, best first, not numbered; equal ones count once.
        session: its turns so far; ``None`` without a session.
        max_chars: code points that past turns may have; the oldest beyond are skipped.
        num_skipped_turns: oldest turns to leave out; ``None``: those left out before.
    """
    turns = session.turns if session is not None else ()
    least = _count_skipped(turns) if num_skipped_turns is None else num_skipped_turns
    num_skipped = max(least, _count_oversized(turns, max_chars))
    kept = {
        idx: turn
        for idx, turn in enumerate(turns)
        if idx >= num_skipped and turn.answer_text.strip()
    }
    in_context = [_from_turn(one, session) for turn in kept.values() for one in turn.passages]
    numbered, next_number = _assign_numbers(found, session)
    known = {passage.number for passage in in_context}
    new = tuple(one for one in numbered if one.number not in known)
    found_numbers = {one.number for one in numbered}
    last = ConversationTurn(passages=tuple(one.to_prompt() for one in new), question=question)
    return Reading(
        conversation=Conversation(turns=(*map(_past_turn, kept.values()), last)),
        found=numbered,
        earlier=tuple(
            replace(one, score=0.0) for one in in_context if one.number not in found_numbers
        ),
        num_skipped_turns=num_skipped,
        kept_turns=tuple(kept),
        next_number=next_number,
    )


def select_subset(reading: Reading, subset_idx: int, num_subsets: int) -> Conversation:
    """Return the conversation with one drafter's share of the passages.

    Passage n belongs to subset (n - 1) mod ``num_subsets``: round robin by rank within a turn, and
    the same passages for a drafter in every turn.
    """

    def share(turn: ConversationTurn) -> ConversationTurn:
        kept = (one for one in turn.passages if (one.number - 1) % num_subsets == subset_idx)
        return replace(turn, passages=tuple(kept))

    return Conversation(turns=tuple(share(turn) for turn in reading.conversation.turns))


def subset_numbers(reading: Reading, subset_idx: int, num_subsets: int) -> tuple[int, ...]:
    """Return the numbers of one drafter's share, ascending."""
    numbers = (passage.number for passage in reading.passages)
    return tuple(sorted(one for one in numbers if (one - 1) % num_subsets == subset_idx))


def passages_of_session(session: Session) -> dict[int, SourcePassage]:
    """Return every passage of the session by its number, as it last entered a prompt."""
    return {one.number: _from_turn(one, session) for turn in session.turns for one in turn.passages}


def passages_of_turn(session: Session, turn: Turn) -> tuple[SourcePassage, ...]:
    """Return what a stored turn rested on: its own passages, then those it referred to."""
    by_number = passages_of_session(session)
    repeated = (by_number[one] for one in turn.repeated_passage_numbers if one in by_number)
    return (*(_from_turn(one, session) for one in turn.passages), *repeated)


def _count_skipped(turns: Sequence[Turn]) -> int:
    """Return how many oldest turns were out of the last turn's prompt."""
    if not turns or turns[-1].outcome is None:
        return 0
    return min(len(turns) - 1, turns[-1].outcome.num_dropped_turns)


def _count_oversized(turns: Sequence[Turn], max_chars: int) -> int:
    """Return how many oldest turns must go so that the rest has at most ``max_chars``."""
    num_chars = 0
    for idx in range(len(turns) - 1, -1, -1):
        turn = turns[idx]
        num_chars += len(turn.question) + len(turn.answer_text)
        num_chars += sum(len(passage.text) for passage in turn.passages)
        if num_chars > max_chars:
            return idx + 1
    return 0


def _assign_numbers(
    found: Sequence[SourcePassage], session: Session | None
) -> tuple[tuple[SourcePassage, ...], int]:
    """Return the passages with their numbers, each once, and the next free number.

    A passage that the session has seen, even in a turn now skipped, has its number already.
    """
    turns = session.turns if session is not None else ()
    numbers = {
        _from_turn(one, session).identity: one.number for turn in turns for one in turn.passages
    }
    next_number = session.info.next_passage_number if session is not None else 1
    numbered: dict[str, SourcePassage] = {}
    for passage in found:
        identity = passage.identity
        if identity in numbered:
            continue
        number = numbers.get(identity, next_number)
        next_number = max(next_number, number + 1)
        numbered[identity] = replace(passage, number=number)
    return tuple(numbered.values()), next_number


def _from_turn(passage: TurnPassage, session: Session | None) -> SourcePassage:
    return SourcePassage(
        chunk_id=passage.chunk_id,
        document_id=passage.document_id,
        title=passage.title,
        uri=passage.uri,
        text=passage.text,
        start_char=passage.start,
        end_char=passage.end,
        score=passage.score,
        number=passage.number,
        collection=session.info.collection if session is not None else "",
        metadata=passage.metadata,
    )


def _past_turn(turn: Turn) -> ConversationTurn:
    return ConversationTurn(
        passages=tuple(
            PromptPassage(number=one.number, title=one.title, text=one.text)
            for one in turn.passages
        ),
        question=turn.question,
        answer=turn.answer_text,
        answer_token_ids=turn.answer_token_ids,
    )
