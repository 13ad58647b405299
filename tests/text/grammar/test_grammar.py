"""Grammars that are refused before anything is compiled, with an error that names the limit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cairn.text.grammar.call_grammar import Offered, lark_of_calls
from cairn.text.grammar.grammar import GrammarError, Kind, Shape, Structure, grammar_text
from cairn.text.grammar.prepare_schema import MAX_OPTIONAL
from cairn.text.output.call_formats import BY_NAME


def text_of(kind: Kind, text: str) -> str:
    return grammar_text(Shape(structure=Structure(kind=kind, text=text)))


@pytest.mark.parametrize("multiple", [100_001, 1e6, 1e300, -100_001, 12345.678, 1.00001, 10**400])
def test_a_large_multiple_is_refused(multiple: Any) -> None:
    """It needs as many states as its value: 3.6 GB of the worker for an integer."""
    schema = {"type": "object", "properties": {"n": {"anyOf": [{"type": "number", "multipleOf": multiple}]}}}
    for refused in (
        lambda: text_of("json", json.dumps(schema)),
        lambda: text_of("lark", f"start: %json  {json.dumps(schema)}\n"),
        lambda: text_of("grammar", f'start: "%json" %json {json.dumps(schema)}\n'),
        lambda: lark_of_calls(BY_NAME["hermes"], [Offered("f", schema)], required=True, parallel=False),
    ):
        with pytest.raises(GrammarError, match=r"multipleOf is .* the limit is 100000"):
            refused()


@pytest.mark.parametrize("multiple", [1, 2.5, 100_000, 1e5, 0.00001, 99999.0, True, "x"])
def test_a_large_bound_is_not_refused(multiple: Any) -> None:
    assert text_of("json", json.dumps({"type": "number", "multipleOf": multiple}))


def test_optional_properties_are_bounded() -> None:
    def schema(count: int, needed: int) -> str:
        names = [f"p{n}" for n in range(count)]
        return json.dumps({"type": "object", "properties": {name: {} for name in names}, "required": names[:needed]})

    assert text_of("json", schema(MAX_OPTIONAL, 0)) and text_of("json", schema(4_000, 4_000 - MAX_OPTIONAL))
    with pytest.raises(GrammarError, match="401 properties that are not required; the limit is 400"):
        text_of("json", schema(MAX_OPTIONAL + 4, 3))
    with pytest.raises(GrammarError, match="4000 properties"):
        text_of("json", json.dumps({"type": "array", "items": json.loads(schema(4_000, 0))}))
