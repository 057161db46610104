from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from milvus_lite.search.filter import parse_expr  # type: ignore[import-untyped]
from milvus_lite.search.filter.ast import (  # type: ignore[import-untyped]
    CmpOp,
    StringLit,
)
from specrag_retriever.expressions import (
    Comparison,
    Condition,
    all_of,
    condition_expression,
    is_field_name,
    one_of,
    quote,
    tenant_is,
)


@given(st.text())
@example('" or true or "')
@example('\\" or true')
@example("a\\\nb\r\t'")
@example('") or (tenant != "')
def test_quoted_value_is_read_back_as_exactly_itself(value: str) -> None:
    """Read by a real server's parser: one comparison with one literal, whatever the value."""
    tree = parse_expr(tenant_is(value))
    assert isinstance(tree, CmpOp)
    assert isinstance(tree.right, StringLit)
    assert tree.right.value == value


@given(st.text())
def test_quoted_value_holds_no_bare_quote_or_line_end(value: str) -> None:
    inner = quote(value)[1:-1].replace("\\\\", "").replace('\\"', "")
    assert '"' not in inner
    assert not set(inner) & set("\n\r\t")


@given(st.lists(st.text(), min_size=1, max_size=5))
def test_list_of_hostile_values_stays_a_list(values: list[str]) -> None:
    tree = parse_expr(one_of("document_id", values))
    assert [element.value for element in tree.values.elements] == values


@given(st.text(), st.sampled_from(list(Comparison)))
def test_condition_parses_for_any_value(value: str, comparison: Comparison) -> None:
    for field in ("lang", "title"):
        condition = Condition(field=field, comparison=comparison, values=(value,))
        parse_expr(all_of([tenant_is(value), condition_expression(condition)]))


@pytest.mark.parametrize("name", ['a"', "a b", "", "A", "a" * 65, "a.b", "a\n", "$meta", "é"])
def test_field_names_that_could_be_more_than_names_are_refused(name: str) -> None:
    assert not is_field_name(name)
