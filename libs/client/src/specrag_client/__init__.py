"""Python client and command line of specrag.

::

    async with SpecragClient("127.0.0.1:50050") as client:
        async for event in client.answer("Who approves leave?", collection="handbook"):
            ...
"""

from specrag_client.answer_text import AnswerText, ReplayError
from specrag_client.client import AnswerOptions, SpecragClient
from specrag_client.documents import Document, DocumentResult, DocumentsClient
from specrag_client.events import (
    AnswerEvent,
    AnswerResult,
    Citation,
    Commit,
    Finished,
    Policy,
    Retract,
    RetrievalDone,
    Speculative,
    TokenLogprob,
    TokenLogprobs,
    TopLogprob,
    VerificationMode,
)

__all__ = [
    "AnswerEvent",
    "AnswerOptions",
    "AnswerResult",
    "AnswerText",
    "Citation",
    "Commit",
    "Document",
    "DocumentResult",
    "DocumentsClient",
    "Finished",
    "Policy",
    "ReplayError",
    "Retract",
    "RetrievalDone",
    "SpecragClient",
    "Speculative",
    "TokenLogprob",
    "TokenLogprobs",
    "TopLogprob",
    "VerificationMode",
]
