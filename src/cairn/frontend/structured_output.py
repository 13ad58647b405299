"""The output constraints of a request, from the fields by which clients ask for JSON, a grammar or tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cairn.text.grammar.grammar import MAX_CHOICES, MAX_TEXT, Kind, Structure, ToolChoice, Wanted
from cairn.types.errors import InvalidRequest, Unsupported

FIELDS: tuple[str, ...] = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
FIELDS += ("grammar", "json_schema")
"""The fields that ask for a structure: OpenAI's, vLLM's and llama.cpp's."""
_KINDS: Mapping[str, Kind] = {"json": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_OBJECT = '{"type":"object"}'


def wanted_of(
    fields: Mapping[str, Any],
    tools: Sequence[tuple[str, bool]] = (),
    tool_choice: Any = None,
    *,
    parallel: bool = True,
) -> Wanted:
    """Return the constraints on an answer.

    `fields`: those of `FIELDS` that the request has. `tools`: the name of each tool, and whether its calls must fit its
    schema; `tool_choice` as a client sends it; `parallel`: whether one answer may contain several calls. Raise
    InvalidRequest or Unsupported, which name the field.
    """
    structures = [one for name, value in fields.items() if value is not None for one in _structures(name, value)]
    if len(structures) > 1:
        one, other = structures[0].field, structures[1].field
        raise InvalidRequest(f"{one} and {other} exclude each other: send one of them", field=other)
    choice = _choice(tool_choice, [name for name, _ in tools])
    strict = tuple(name for name, held in tools if held)
    choice = ToolChoice(required=choice.required, names=choice.names, strict=strict, parallel=parallel)
    return Wanted(structure=structures[0] if structures else None, choice=choice)


def _structures(name: str, value: Any) -> Iterator[Structure]:
    if name == "response_format":
        yield from _response_format(value)
    elif name == "structured_outputs":
        yield from _structured_outputs(value)
    elif name == "grammar":
        if value != "":  # llama.cpp's own clients send an empty one unasked
            yield _structure("gbnf", value, name)
    else:
        yield _structure("json" if name == "json_schema" else _KINDS[name.removeprefix("guided_")], value, name)


def _response_format(value: Any) -> Iterator[Structure]:
    """Yield OpenAI's structure, with llama.cpp's `schema` beside a type; vLLM's structural tags are not supported."""
    field = "response_format"
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return
    if kind not in ("json_object", "json_schema", "grammar", "regex"):
        raise Unsupported(
            f"{field}.type must be text, json_object, json_schema, grammar or regex",
            field=f"{field}.type",
        )
    if kind in ("grammar", "regex"):
        name = "pattern" if kind == "regex" else "grammar"
        yield _structure(_KINDS[kind], value.get(name), f"{field}.{name}")
        return
    inner = value.get("json_schema")
    if isinstance(inner, Mapping) and "schema" in inner:
        yield _structure("json", inner["schema"], f"{field}.json_schema.schema", strict=inner.get("strict") is True)
    elif value.get("schema") is not None:
        yield _structure("json", value["schema"], f"{field}.schema")
    elif kind == "json_schema":
        raise InvalidRequest(f"{field}.json_schema.schema is missing", field=f"{field}.json_schema.schema")
    else:
        yield Structure(kind="json", text=_OBJECT, field=field)


def _structured_outputs(outputs: Any) -> Iterator[Structure]:
    """Yield vLLM's structure: one of the members says what is wanted."""
    field = "structured_outputs"
    if not isinstance(outputs, Mapping):
        raise InvalidRequest(f"{field} must be an object", field=field)
    for name, value in outputs.items():
        where = f"{field}.{str(name)[:64]}"
        if value is None or (name.startswith(("disable_", "enable_")) and value is False) or name.startswith("_"):
            continue
        if name == "json_object":
            if value:
                yield Structure(kind="json", text=_OBJECT, field=where)
        elif name in ("json", "regex", "choice", "grammar"):
            yield _structure(_KINDS[name], value, where)
        else:
            raise Unsupported(f"{where} is not supported", field=where)


def _structure(kind: Kind, value: Any, field: str, *, strict: bool = False) -> Structure:
    """Return the structure that one field asks for. `strict`: refuse a schema that cannot be enforced in full."""
    if kind == "json":
        if isinstance(value, str):
            _check_size(value, field)
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise InvalidRequest(f"{field} must be a JSON schema", field=field) from None
        if not isinstance(value, Mapping | bool):
            raise InvalidRequest(f"{field} must be a JSON schema: an object", field=field)
        text = json.dumps(value, ensure_ascii=False)
        _check_size(text, field)
        return Structure(kind=kind, text=text, field=field, strict=strict)
    if kind == "choice":
        texts = isinstance(value, list) and all(isinstance(one, str) for one in value)
        if not texts or not 0 < len(value) <= MAX_CHOICES:
            raise InvalidRequest(f"{field} must be a list of 1 to {MAX_CHOICES} texts", field=field)
        return Structure(kind=kind, text=json.dumps(list(dict.fromkeys(value)), ensure_ascii=False), field=field)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{field} must be a text that is not empty", field=field)
    _check_size(value, field)
    return Structure(kind=kind, text=value, field=field)


def _check_size(text: str, field: str) -> None:
    """Raise InvalidRequest for more text than the compiling process takes, before anything is done with it here."""
    if len(text) > MAX_TEXT:
        raise InvalidRequest(f"{field} has {len(text)} characters; the limit is {MAX_TEXT}", field=field)


def _choice(choice: Any, offered: Sequence[str]) -> ToolChoice:
    """Parse OpenAI's `tool_choice`, and the forms in which some clients send it."""
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        inner = inner if isinstance(inner, Mapping) else {}
        listed = inner.get("tools")
        names = [_named(tool) for tool in listed] if isinstance(listed, list | tuple) else []
        return _called(inner.get("mode", "auto"), names, offered)
    if isinstance(choice, Mapping) and choice.get("type") in ("function", "tool", "custom"):
        return _called("required", [_named(choice)], offered)
    if isinstance(choice, Mapping):
        choice = choice.get("type", choice.get("mode", ""))
    return _called("auto" if choice is None else choice, None, offered)


def _called(mode: Any, names: Sequence[Any] | None, offered: Sequence[str]) -> ToolChoice:
    mode = "required" if mode == "any" else mode
    if mode not in ("none", "auto", "required"):
        raise InvalidRequest(
            "tool_choice must be 'none', 'auto' or 'required', name a function, or list allowed_tools",
            field="tool_choice",
        )
    if mode == "required" and not offered:
        raise InvalidRequest("tool_choice requires a call, but there are no tools", field="tool_choice")
    known = frozenset(offered)
    wrong = next(([name] for name in names or () if not isinstance(name, str) or name not in known), [])
    if names is not None and (not names or wrong):
        named = f" {wrong[0][:64]!r}" if wrong and isinstance(wrong[0], str) else ""
        raise InvalidRequest(f"tool_choice names a tool{named} that is not among tools", field="tool_choice")
    return ToolChoice(required=mode == "required", names=None if names is None else tuple(dict.fromkeys(names)))


def _named(tool: Any) -> Any:
    """Return the name of a tool in a choice: in OpenAI's it is in `function` or `custom`, in others beside the type."""
    if not isinstance(tool, Mapping):
        return None
    inner = next((found for key in ("function", "custom") if isinstance(found := tool.get(key), Mapping)), tool)
    return inner.get("name")
