"""What callers of `LLM` give, checked and brought to one form: conversations, tools, and the form of an answer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast, get_origin

import msgspec

from cairn.types.errors import InvalidRequest

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Message = Mapping[str, Any]
Conversation = str | Iterable[Message]
"""Messages in OpenAI's format, or the text of a user's only one."""
Function = Callable[..., Any]
Tool = Message | Function
"""A tool in OpenAI's format, or a function with typed parameters and a docstring."""


def objects(field: str, given: object) -> list[dict[str, Any]]:
    """Read messages or tools once, since they may come from a generator. Raises InvalidRequest for anything else."""
    listed = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    items = list(given) if listed and isinstance(given, Iterable) else []
    if not listed or not all(isinstance(item, Mapping) for item in items):
        raise InvalidRequest(f"{field} must be a list of objects, as in OpenAI's chat format", field=field)
    return [dict(item) for item in items]


def conversations(given: object) -> tuple[list[list[dict[str, Any]]], bool]:
    """Return the conversations, and whether the caller gave several. Raises InvalidRequest.

    A text is a user's message; a list of objects is one conversation; any other list has one conversation an element.
    """
    if isinstance(given, str):
        return [_said(given, "messages")], False
    if not isinstance(given, Iterable) or isinstance(given, bytes | Mapping):
        raise InvalidRequest(
            "messages must be a text, a list of objects as in OpenAI's chat format, or a list of such conversations",
            field="messages",
        )
    items = list(given)
    if all(isinstance(item, Mapping) for item in items):
        return [objects("messages", items)], False
    fields = [f"messages[{index}]" for index in range(len(items))]
    return [
        _said(item, field) if isinstance(item, str) else objects(field, item)
        for item, field in zip(items, fields, strict=True)
    ], True


def _said(text: str, field: str) -> list[dict[str, Any]]:
    if not text:
        raise InvalidRequest(f"{field} is an empty text; a user's message has at least one character", field=field)
    return [{"role": "user", "content": text}]


class OfferedTools(msgspec.Struct, frozen=True):
    """The tools of one call, in OpenAI's format."""

    tools: list[dict[str, Any]]
    functions: Mapping[str, TypeAdapter[Any]]
    """By name, those that were given as functions: each calls its own with checked arguments."""

    @property
    def names(self) -> list[tuple[str, bool]]:
        """The name of each tool, and whether its calls must fit its schema."""
        return [(tool["function"]["name"], tool["function"].get("strict") is True) for tool in self.tools]

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The tools as a chat template sees them."""
        without = [{key: value for key, value in tool["function"].items() if key != "strict"} for tool in self.tools]
        return [{**tool, "function": function} for tool, function in zip(self.tools, without, strict=True)]


def offered_tools(given: object) -> OfferedTools:
    """Read tools once: objects in OpenAI's format, functions, or what was read before. Raises InvalidRequest."""
    if isinstance(given, OfferedTools):
        return given
    listed = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    items = list(given) if listed and isinstance(given, Iterable) else []
    if not listed or not all(isinstance(item, Mapping) or callable(item) for item in items):
        raise InvalidRequest("tools must be a list of objects, as in OpenAI's chat format, or functions", field="tools")
    tools, functions = [], {}
    for index, item in enumerate(items):
        if isinstance(item, Mapping):
            tools.append(_declared(item, index))
        else:
            tool, call = _of_function(item, index)
            tools.append(tool)
            functions[tool["function"]["name"]] = call
    return OfferedTools(tools, functions)


def _declared(tool: Message, index: int) -> dict[str, Any]:
    function = tool.get("function")
    named = isinstance(function, Mapping) and isinstance(function.get("name"), str) and function["name"]
    if tool.get("type") != "function" or not named:
        raise InvalidRequest(
            f'tools[{index}] must look like {{"type": "function", "function": {{"name": ...}}}}, or be a function',
            field="tools",
        )
    return dict(tool)


def _of_function(function: Function, index: int) -> tuple[dict[str, Any], TypeAdapter[Any]]:
    """Describe a function as a tool: its name, its docstring, and the JSON schema of its parameters."""
    from pydantic import PydanticUserError, TypeAdapter

    name = getattr(function, "__name__", "")
    where = f"tools[{index}]{f', the function {name},' if name else ''}"
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name):
        raise InvalidRequest(f"{where} needs a name of at most 64 letters and digits; use def", field="tools")
    try:
        parameters = inspect.signature(function).parameters.values()
        call: TypeAdapter[Any] = TypeAdapter(cast(Any, function))
        schema = call.json_schema()
    except (PydanticUserError, TypeError, ValueError, NameError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidRequest(f"{where} cannot be described as a tool: {reason}", field="tools") from None
    if any(one.kind in (one.POSITIONAL_ONLY, one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters):
        raise InvalidRequest(f"{where} must have named parameters only, without *, ** and /", field="tools")
    said, of_parameters = _described(inspect.getdoc(function) or "")
    for key, text in of_parameters.items():
        if key in schema.get("properties", {}):
            schema["properties"][key].setdefault("description", text)
    declared = {"name": name, "description": said, "parameters": schema}
    return {"type": "function", "function": declared}, call


_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):\s*")
_PARAMETER = re.compile(r"\*{0,2}(\w+)\s*(?:\([^()]*\))?:\s*(.+)")


def _described(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into what stands before its sections and what `Args:` says of each parameter."""
    before: list[str] = []
    found: dict[str, str] = {}
    section, last = "", ""
    for line in text.splitlines():
        if heading := _SECTION.fullmatch(line):
            section = heading[1]
        elif not section:
            before.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            if named := _PARAMETER.fullmatch(line.strip()):
                last = named[1]
                found[last] = named[2].strip()
            elif last and line.strip():
                found[last] += " " + line.strip()
    return "\n".join(before).strip(), found


def form_of(given: object) -> tuple[Any, TypeAdapter[Any] | None]:
    """Return OpenAI's `response_format`, and what reads an answer back where a class was given. Raises InvalidRequest.

    Classes are pydantic models, dataclasses, enums, and types such as `list[Person]` and `int`.
    """
    if not isinstance(given, type) and get_origin(given) is None:
        return given, None
    from pydantic import PydanticUserError, TypeAdapter

    name = getattr(given, "__name__", "answer")
    try:
        reader: TypeAdapter[Any] = TypeAdapter(cast(Any, given))
        schema = reader.json_schema()
    except (PydanticUserError, TypeError, ValueError, NameError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidRequest(f"response_format: no JSON schema of {name}: {reason}", field="response_format") from None
    return {"type": "json_schema", "json_schema": {"name": name, "schema": _closed(schema)}}, reader


def _closed(schema: Any) -> Any:
    """Return the schema of a class without fields that the class does not name: a model may make up many."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key in ("properties", "$defs"):
        if key in found:
            found[key] = {name: _closed(inner) for name, inner in found[key].items()}
    for key in ("anyOf", "allOf", "oneOf", "prefixItems"):
        if key in found:
            found[key] = [_closed(inner) for inner in found[key]]
    for key in ("items", "additionalProperties"):
        if key in found:
            found[key] = _closed(found[key])
    if "properties" in found:
        found.setdefault("additionalProperties", False)
    return found


def are_prompts(given: object) -> bool:
    """Return whether it is a sequence of texts and of sequences of token ids."""
    if not isinstance(given, Sequence):
        return False
    return all(
        isinstance(prompt, str) or (is_list(prompt) and all(isinstance(token, int) for token in prompt))
        for prompt in given
    )


def is_list(given: object) -> TypeGuard[Sequence[Any]]:
    """Return whether it may be a list of token ids: bytes are text that was not decoded."""
    return isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray | memoryview)


def template_args_of(given: object) -> dict[str, Any] | None:
    """Return the arguments of a chat template. Raises InvalidRequest for what is no object."""
    if given is None:
        return None
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidRequest("template_args must be an object: names and their values", field="template_args")
    return dict(given)
