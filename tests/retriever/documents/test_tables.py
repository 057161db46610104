from __future__ import annotations

from specrag_retriever.documents.tables import CELLS_PER_LINE, render_row


def test_wide_row_repeats_its_first_cell_on_every_line() -> None:
    names = ["id", *(f"c{index}" for index in range(40))]
    lines = render_row(names, [f"v{index}" for index in range(41)])
    assert all(line.startswith("id: v0; ") for line in lines)
    assert all(line.count(";") < CELLS_PER_LINE for line in lines)
    cells = [cell for line in lines for cell in line.split("; ")[1:]]
    assert cells == [f"c{index}: v{index + 1}" for index in range(40)]


def test_ragged_rows_keep_every_cell() -> None:
    assert render_row(["a", "b"], ["1", "2", "3"]) == ["a: 1; b: 2; 3"]
    assert render_row(["a", "b"], ["1"]) == ["a: 1"]
    assert render_row(["a", "b"], ["", " "]) == []
