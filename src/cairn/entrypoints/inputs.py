"""Inputs of `LLM` calls, checked and normalised: conversations, tools, and the response format."""

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
"""Messages in OpenAI's format, or the text of a single user message."""
Function = Callable[..., Any]
Tool = Message | Function
"""A tool in OpenAI's format, or a function with typed parameters and a docstring."""


def objects(field: str, value: object) -> list[dict[str, Any]]:
    """Return an iterable of objects as a list; a generator is read once. Raises InvalidRequest for anything else."""
    listed = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    items = list(value) if listed and isinstance(value, Iterable) else []
    if not listed or not all(isinstance(item, Mapping) for item in items):
        raise InvalidRequest(f"{field} must be a list of objects, as in OpenAI's chat format", field=field)
    return [dict(item) for item in items]


def conversations(value: object) -> tuple[list[list[dict[str, Any]]], bool]:
    """Return the conversations, and whether the caller passed a list of them. Raises InvalidRequest.

    A text is one user message. A list of objects is one conversation. Any other list has one conversation per element.
    """
    if isinstance(value, str):
        return [_user_message(value, "messages")], False
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping):
        raise InvalidRequest(
            "messages must be a text, a list of objects as in OpenAI's chat format, or a list of such conversations",
            field="messages",
        )
    items = list(value)
    if all(isinstance(item, Mapping) for item in items):
        return [_messages("messages", items)], False
    fields = [f"messages[{index}]" for index in range(len(items))]
    return [
        _user_message(item, field) if isinstance(item, str) else _messages(field, item)
        for item, field in zip(items, fields, strict=True)
    ], True


def _messages(field: str, value: object) -> list[dict[str, Any]]:
    """Return the messages of one conversation. Raises InvalidRequest for one without content that says nothing else."""
    found = objects(field, value)
    for index, message in enumerate(found):
        if message.get("content") is None and message.get("role") != "assistant":
            keys = ", ".join(str(key) for key in list(message)[:8])
            raise InvalidRequest(
                f'{field}[{index}] has no content; it must look like {{"role": "user", "content": "..."}}, '
                f"and its fields are: {keys or 'none'}",
                field=f"{field}[{index}].content",
            )
    return found


def _user_message(text: str, field: str) -> list[dict[str, Any]]:
    if not text:
        raise InvalidRequest(f"{field} is an empty text; a user message needs at least one character", field=field)
    return [{"role": "user", "content": text}]


class OfferedTools(msgspec.Struct, frozen=True):
    """The tools of one call, in OpenAI's format."""

    tools: list[dict[str, Any]]
    functions: Mapping[str, TypeAdapter[Any]]
    """The tools that were passed as functions, by name; each validates the arguments and calls its function."""

    @property
    def names(self) -> list[tuple[str, bool]]:
        """The name of each tool, and whether it is `strict`: its calls must fit its schema."""
        return [(tool["function"]["name"], tool["function"].get("strict") is True) for tool in self.tools]

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The tools as the chat template gets them: without `strict`."""
        without = [{key: value for key, value in tool["function"].items() if key != "strict"} for tool in self.tools]
        return [{**tool, "function": function} for tool, function in zip(self.tools, without, strict=True)]


def offered_tools(value: object) -> OfferedTools:
    """Return the tools of a call: objects in OpenAI's format, functions, or OfferedTools. Raises InvalidRequest."""
    if isinstance(value, OfferedTools):
        return value
    listed = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    items = list(value) if listed and isinstance(value, Iterable) else []
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
    """Return the tool that describes a function (name, docstring, JSON schema), and what calls it."""
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
    unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(parameter.kind in unnamed for parameter in parameters):
        raise InvalidRequest(f"{where} must have named parameters only, without *, ** and /", field="tools")
    description, of_parameters = _split_docstring(inspect.getdoc(function) or "")
    for key, text in of_parameters.items():
        if key in schema.get("properties", {}):
            schema["properties"][key].setdefault("description", text)
    declared = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": declared}, call


_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):\s*")
_PARAMETER = re.compile(r"\*{0,2}(\w+)\s*(?:\([^()]*\))?:\s*(.+)")


def _split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first section, and the description of each parameter in `Args:`."""
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


def form_of(value: object) -> tuple[Any, TypeAdapter[Any] | None]:
    """Return OpenAI's `response_format`, and the parser of answers if `value` is a class. Raises InvalidRequest.

    Classes are pydantic models, dataclasses, enums, and types such as `list[Person]` and `int`.
    """
    if not isinstance(value, type) and get_origin(value) is None:
        return value, None
    from pydantic import PydanticUserError, TypeAdapter

    name = getattr(value, "__name__", "answer")
    try:
        reader: TypeAdapter[Any] = TypeAdapter(cast(Any, value))
        schema = reader.json_schema()
    except (PydanticUserError, TypeError, ValueError, NameError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidRequest(f"response_format: no JSON schema of {name}: {reason}", field="response_format") from None
    return {"type": "json_schema", "json_schema": {"name": name, "schema": _closed(schema)}}, reader


def _closed(schema: Any) -> Any:
    """Return the schema with additional properties forbidden: a model could invent any number of fields."""
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


def are_prompts(value: object) -> bool:
    """Return whether the value is a sequence of texts and of sequences of token ids."""
    if not isinstance(value, Sequence):
        return False
    return all(
        isinstance(prompt, str) or (is_list(prompt) and all(isinstance(token, int) for token in prompt))
        for prompt in value
    )


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether the value may be a list of token ids; bytes are not, they are undecoded text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def template_args_of(value: object) -> dict[str, Any] | None:
    """Return the variables of a chat template. Raises InvalidRequest unless they are an object."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise InvalidRequest("template_args must be an object: names and their values", field="template_args")
    return dict(value)
