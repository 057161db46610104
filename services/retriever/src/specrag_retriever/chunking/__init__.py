"""Extracted text to passages (what is returned) and windows (what is searched)."""

from specrag_retriever.chunking.passages import TextPassage, split_into_passages
from specrag_retriever.chunking.windows import Window, split_into_windows

__all__ = ["TextPassage", "Window", "split_into_passages", "split_into_windows"]
