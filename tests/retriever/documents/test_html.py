from __future__ import annotations

import pytest
from specrag_retriever.documents.html import parse_html
from specrag_retriever.documents.model import BlockKind, DocumentSkippedError

PAGE = """<!doctype html><html><head><title>Returns &amp; refunds</title>
<script>var fee="99 percent"</script><style>.x{color:red}</style></head><body>
<!-- fee: 77 percent --><div style="display: none">fee: 50 percent</div><p hidden>fee: 40</p>
<h1>Returns &#8212; rules</h1><p>The fee is <b>12&nbsp;percent</b>
   of the price&hellip;<br>Always.</p><noscript>JavaScript?</noscript>
<ul><li>one<li>two <ul><li>inner</ul></ul><pre>a
  b</pre><p>Unclosed <b>tag<p>Next</body>"""


def test_only_visible_text_is_kept() -> None:
    document = parse_html(PAGE)
    assert document.text == (
        "Returns — rules\n\nThe fee is 12 percent of the price…\nAlways.\n\n"
        "- one\n- two\n  - inner\n\na\n  b\n\nUnclosed tag\n\nNext"
    )
    assert document.title == "Returns & refunds"
    assert document.blocks[0].kind is BlockKind.HEADING


def test_data_tables_become_rows_with_column_names() -> None:
    table = "<table><tr><th>Size<th>Fee</tr><tr><td>big<td>12%</tr><tr><td>small<td>5%</table>"
    assert parse_html(table).text == "Size: big; Fee: 12%\nSize: small; Fee: 5%"


def test_header_over_all_columns_names_the_table() -> None:
    table = "<table><tr><th colspan=2>Fees</th></tr><tr><td>Standard<td>12%</table>"
    assert parse_html(table).text == "Fees\n\nStandard | 12%"


def test_layout_tables_are_read_as_text() -> None:
    table = "<table><tr><td><h2>Left</h2><p>one</p></td><td><p>two</p></td></tr></table>"
    assert parse_html(table).text == "Left\n\none\n\ntwo"


def test_absurd_nesting_is_refused_quickly() -> None:
    with pytest.raises(DocumentSkippedError, match="nested more than"):
        parse_html("<div>" * 100_000 + "x")


def test_deep_but_sane_nesting_is_read() -> None:
    assert parse_html("<div>" * 1500 + "deep text").text == "deep text"
