"""Finding documents under files and folders."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from specrag_client.discovery import DiscoveryError, as_document_id, discover
from specrag_client.documents import MAX_DOCUMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from specrag_client.discovery import Discovery


def make(root: Path, names: Iterable[str]) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def ids(found: Discovery) -> list[str]:
    return [one.document_id for one in found.files]


def skipped(found: Discovery) -> dict[str, str]:
    return {one.document_id: one.reason for one in found.skipped}


def test_ids_are_paths_below_the_folder_named_sorted(tmp_path: Path) -> None:
    make(tmp_path, ["b.md", "a/z.txt", "a/b/c.html"])
    assert ids(discover([tmp_path])) == ["b.md", "a/z.txt", "a/b/c.html"]


def test_id_of_a_file_named_is_its_name(tmp_path: Path) -> None:
    make(tmp_path, ["a/z.txt"])
    assert ids(discover([tmp_path / "a" / "z.txt"])) == ["z.txt"]


def test_ids_do_not_depend_on_how_the_folder_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, ["docs/a/x.md"])
    monkeypatch.chdir(tmp_path / "docs" / "a")
    for spelling in (tmp_path / "docs", tmp_path / "docs" / "a" / "..", type(tmp_path)("..")):
        assert ids(discover([spelling])) == ["a/x.md"]


def test_hidden_entries_are_named_once_and_not_walked(tmp_path: Path) -> None:
    make(tmp_path, [".git/config", ".git/objects/1", ".DS_Store", "a.md"])
    found = discover([tmp_path])
    assert ids(found) == ["a.md"]
    assert skipped(found) == {".git/": "HIDDEN", ".DS_Store": "HIDDEN"}


def test_link_to_a_folder_is_not_followed_so_that_loops_end(tmp_path: Path) -> None:
    make(tmp_path, ["a/x.md"])
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    found = discover([tmp_path])
    assert ids(found) == ["a/x.md"]
    assert skipped(found) == {"a/loop/": "LINK"}


def test_link_to_a_file_is_read_and_a_broken_one_named(tmp_path: Path) -> None:
    make(tmp_path, ["x.md"])
    (tmp_path / "link.md").symlink_to(tmp_path / "x.md")
    (tmp_path / "broken.md").symlink_to(tmp_path / "nowhere")
    found = discover([tmp_path])
    assert ids(found) == ["link.md", "x.md"]
    assert skipped(found) == {"broken.md": "UNREADABLE"}


def test_pipe_is_named_and_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    assert skipped(discover([tmp_path])) == {"pipe.txt": "NOT_A_FILE"}


def test_file_over_the_limit_is_named_with_both_sizes(tmp_path: Path) -> None:
    with (tmp_path / "big.txt").open("wb") as big:
        big.truncate(MAX_DOCUMENT_BYTES + 1)
    found = discover([tmp_path])
    assert skipped(found) == {"big.txt": "TOO_LARGE"}
    assert found.skipped[0].detail == "33554433 bytes; the limit is 33554432"


def test_name_that_is_not_unicode_gets_an_id_that_is(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    assert ids(discover([tmp_path])) == ["caf%E9.txt"]
    assert as_document_id("naïve 猫.txt") == "naïve 猫.txt"


def test_two_files_with_one_id_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    make(tmp_path, ["a/x.md", "b/x.md"])
    with pytest.raises(DiscoveryError, match=r"would both be document 'x.md'"):
        discover([tmp_path / "a", tmp_path / "b"])


def test_one_file_named_twice_is_no_clash(tmp_path: Path) -> None:
    make(tmp_path, ["a/x.md"])
    assert ids(discover([tmp_path / "a", tmp_path / "a" / "x.md"])) == ["x.md"]


def test_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match=r"nowhere does not exist"):
        discover([tmp_path / "nowhere"])


def test_folder_without_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DiscoveryError, match="no files under"):
        discover([tmp_path])


def test_control_characters_in_a_name_leave_out_that_file_only(tmp_path: Path) -> None:
    make(tmp_path, ["a.md", "new\nline.md", "z.md"])
    found = discover([tmp_path])
    assert ids(found) == ["a.md", "z.md"]
    assert skipped(found) == {"new\nline.md": "BAD_NAME"}
