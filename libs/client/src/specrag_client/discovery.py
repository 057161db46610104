"""Finding the documents under files and folders; whatever is left out is named with its reason."""

from __future__ import annotations

import os
import stat
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specrag_client.documents import MAX_DOCUMENT_BYTES, MAX_DOCUMENT_ID_CHARS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class DiscoveryError(ValueError):
    """The paths given make no set of documents; ``str`` is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """A file to ingest: its path on disk, and its id, the path below the folder it was found in."""

    path: Path
    document_id: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedFile:
    """A file or folder left out, with the reason as one word and in words."""

    document_id: str
    reason: str
    detail: str


@dataclass(slots=True)
class Discovery:
    """What was found, in the order it will be ingested, and what was left out."""

    files: list[FoundFile] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)


def discover(paths: Sequence[Path]) -> Discovery:
    """Walk files and folders, sorted by name; hidden entries and links to folders are left out.

    Raises:
        DiscoveryError: a path does not exist, two files would get one id, or there is no file.
    """
    for path in paths:
        _require_existing(path)
    found = Discovery()
    for path in paths:
        if path.is_dir():
            _walk(path, found)
        else:
            _examine(path, path.name, found)
    found.files = _without_repeats(found.files)
    if not found.files and not found.skipped:
        raise DiscoveryError(f"no files under {', '.join(map(str, paths))}")
    return found


def as_document_id(name: str) -> str:
    """Return a file name as valid Unicode; bytes that are none become ``%XX``."""
    return "".join(
        f"%{ord(character) - 0xDC00:02X}" if 0xDC80 <= ord(character) <= 0xDCFF else character
        for character in name
    )


def _require_existing(path: Path) -> None:
    try:
        path.stat()
    except FileNotFoundError as exc:
        raise DiscoveryError(f"{path} does not exist") from exc
    except OSError as exc:
        raise DiscoveryError(f"cannot read {path}: {exc.strerror}") from exc


def _walk(root: Path, found: Discovery) -> None:
    def unreadable(error: OSError) -> None:
        name = as_document_id(os.path.relpath(error.filename, root))
        found.skipped.append(_unreadable(name, error))

    for folder, subfolders, names in os.walk(root, onerror=unreadable):
        here = Path(folder)
        for name in sorted(subfolders):
            _leave_out_folder(here / name, root, found)
        subfolders[:] = sorted(_visible(here, subfolders))
        for name in sorted(names):
            path = here / name
            _examine(path, path.relative_to(root).as_posix(), found)


def _visible(here: Path, names: Iterable[str]) -> Iterator[str]:
    return (name for name in names if not name.startswith(".") and not (here / name).is_symlink())


def _leave_out_folder(path: Path, root: Path, found: Discovery) -> None:
    name = as_document_id(path.relative_to(root).as_posix()) + "/"
    if path.name.startswith("."):
        found.skipped.append(SkippedFile(document_id=name, reason="HIDDEN", detail="hidden folder"))
    elif path.is_symlink():
        found.skipped.append(
            SkippedFile(document_id=name, reason="LINK", detail="link to a folder, not followed")
        )


def _examine(path: Path, name: str, found: Discovery) -> None:
    document_id = as_document_id(name)
    reason, detail = "", ""
    size_bytes = 0
    try:
        status = path.stat()
        size_bytes = status.st_size
    except OSError as exc:
        found.skipped.append(_unreadable(document_id, exc))
        return
    if path.name.startswith("."):
        reason, detail = "HIDDEN", "hidden file"
    elif not stat.S_ISREG(status.st_mode):
        reason, detail = "NOT_A_FILE", "neither a file nor a folder"
    elif size_bytes > MAX_DOCUMENT_BYTES:
        reason = "TOO_LARGE"
        detail = f"{size_bytes} bytes; the limit is {MAX_DOCUMENT_BYTES}"
    elif len(document_id) > MAX_DOCUMENT_ID_CHARS:
        reason = "NAME_TOO_LONG"
        detail = f"{len(document_id)} characters; the limit is {MAX_DOCUMENT_ID_CHARS}"
    elif any(unicodedata.category(character) == "Cc" for character in document_id):
        reason, detail = "BAD_NAME", f"control characters in the name {document_id!r}; rename it"
    if reason:
        found.skipped.append(SkippedFile(document_id=document_id, reason=reason, detail=detail))
    else:
        found.files.append(FoundFile(path=path, document_id=document_id, size_bytes=size_bytes))


def _unreadable(document_id: str, error: OSError) -> SkippedFile:
    return SkippedFile(
        document_id=document_id, reason="UNREADABLE", detail=error.strerror or str(error)
    )


def _without_repeats(files: Iterable[FoundFile]) -> list[FoundFile]:
    """Return each file once.

    Raises:
        DiscoveryError: two different files have one id, and the second would replace the first.
    """
    first: dict[str, FoundFile] = {}
    for file in files:
        other = first.setdefault(file.document_id, file)
        if other is not file and not other.path.samefile(file.path):
            raise DiscoveryError(
                f"{other.path} and {file.path} would both be document {file.document_id!r}; "
                "give a folder that holds both"
            )
    return list(first.values())
