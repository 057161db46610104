"""Finding passages through the retriever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from specrag.v1 import retriever_pb2
from specrag_common.runtime.errors import InvalidRequest

from specrag_orchestrator.requests import decode_passage
from specrag_orchestrator.upstream import malformed, peer_errors

if TYPE_CHECKING:
    from specrag.v1 import retriever_pb2_grpc

    from specrag_orchestrator.passages import SourcePassage
    from specrag_orchestrator.question import Question

PEER: Final = "retriever"

_FIELD_NAMES: Final = {"top_k": "num_passages", "query": "question"}
"""Fields of a search by the names they have in a question."""


class PassageSearch:
    """Searches one retriever."""

    def __init__(
        self,
        stub: retriever_pb2_grpc.RetrieverServiceAsyncStub,
        *,
        num_passages: int,
        timeout_s: float,
    ) -> None:
        """Search through ``stub``.

        Args:
            stub: the retriever.
            num_passages: passages for questions that state no number.
            timeout_s: longest search; less when less is left of the request.
        """
        self._stub = stub
        self._num_passages = num_passages
        self._timeout_s = timeout_s

    async def search(self, question: Question, query: str) -> list[SourcePassage]:
        """Return the passages nearest to ``query`` in the question's collection, best first.

        Raises:
            SpecragError: what the retriever answers: unknown collection, bad filter, not
                available, too slow.
        """
        request = retriever_pb2.SearchRequest(
            collection=question.collection,
            tenant=question.tenant,
            query=query,
            top_k=question.num_passages or self._num_passages,
            filters=question.filters,
        )
        try:
            with peer_errors(PEER):
                response = await self._stub.Search(request, timeout=self._timeout_s)
        except InvalidRequest as exc:
            raise _rename_fields(exc) from exc
        for message in response.passages:
            if not message.text or not message.chunk_id:
                raise malformed(PEER, "a passage without text or chunk_id")
        return [decode_passage(message, question.collection) for message in response.passages]


def _rename_fields(error: InvalidRequest) -> InvalidRequest:
    """Return the error with the field names that our caller knows."""
    if not error.violations:
        return error
    return InvalidRequest.of(
        type(one)(_FIELD_NAMES.get(one.field, one.field), one.description)
        for one in error.violations
    )
