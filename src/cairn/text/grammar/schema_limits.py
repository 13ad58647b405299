"""What of a schema costs too much to follow, whoever asks for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

MAX_DEPTH = 128
"""Schemas within each other."""
MAX_OPTIONAL = 400
"""Properties of one object that may be left out: each is up to four items of one step."""
MAX_MULTIPLE = 100_000
"""Of `multipleOf`: a number has as many states, of up to 500 bytes, and they are all made when it is compiled."""
REPEATS = "an object may name a key twice, so how many it has cannot be held to"


class SchemaError(ValueError):
    """Why answers cannot be held to a schema: a sentence for its sender."""


def check_all(schema: Any, depth: int = 0) -> None:
    """Check a schema that is compiled as it is, and all within it. Raises SchemaError."""
    if depth > MAX_DEPTH:
        raise SchemaError("the schema is nested too deeply")
    if isinstance(schema, dict):
        _check_costs(schema)
        if counts_keys(schema):
            raise SchemaError(f'"minProperties" cannot be held to: {REPEATS}')
        for value in schema.values():
            check_all(value, depth + 1)
    elif isinstance(schema, list):
        for value in schema:
            check_all(value, depth + 1)


def counts_keys(schema: Mapping[str, Any]) -> bool:
    """Tell whether `minProperties` asks for more keys than are required: a model may write one twice."""
    least, required = schema.get("minProperties"), schema.get("required")
    sure = set(map(str, required)) if isinstance(required, list) else set()
    return isinstance(least, int | float) and least > len(sure)


def _check_costs(schema: Mapping[str, Any]) -> None:
    """Check one schema, without those within it."""
    required, properties = schema.get("required"), schema.get("properties")
    sure = set(map(str, required)) if isinstance(required, list) else set()
    optional = len(properties.keys() - sure) if isinstance(properties, dict) else 0
    if optional > MAX_OPTIONAL:
        raise SchemaError(
            f"an object has {optional} properties that are not required; the limit is {MAX_OPTIONAL}: "
            "make more of them required, or put them into objects within it"
        )
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and not _few_units(multiple):
        raise SchemaError(
            f"multipleOf is {multiple!s:.40}; the limit is {MAX_MULTIPLE}, counted in units of its last decimal place"
        )


def _few_units(number: float) -> bool:
    """Return whether a number, in units of its last decimal place (25 for 2.5), is within `MAX_MULTIPLE`."""
    if isinstance(number, int):
        return abs(number) <= MAX_MULTIPLE
    if not math.isfinite(number):
        return False
    exact = abs(Decimal(str(number))).normalize()
    places = exact.as_tuple().exponent
    return exact.scaleb(max(0, -places if isinstance(places, int) else 0)) <= MAX_MULTIPLE
