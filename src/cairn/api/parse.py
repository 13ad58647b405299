"""From a JSON object to a request body: the fields that are accepted without effect, those whose meaning is not built,
what is too long to be looked at, and the sentence for what has the wrong shape."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, TypeVar

from pydantic import ValidationError

from cairn.api.reply import shown
from cairn.api.schemas import Body, Generation
from cairn.config import Config
from cairn.errors import InvalidRequest, Unsupported
from cairn.service.requests import MAX_BIAS

HARMLESS = frozenset(
    {
        "user",
        "service_tier",
        "safety_identifier",
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",
    }
)
"""Fields that are accepted and have no effect: leaving them out never changes the answer."""

_NO: tuple[Any, ...] = (None, False, [], {})
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True),
    "audio": _NO,
    "functions": _NO,
    "function_call": (None, "auto", "none"),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "best_of": (None, 1),
    "moderation": (None,),
}
"""Fields whose meaning is not built, with the values that ask for nothing; every other value is a 400."""

MESSAGE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "refusal": (None,),
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
}
"""The same for fields of a message: what openai-python's message objects carry when they are sent back."""

MESSAGE_OWN = frozenset({"parsed", "provider_specific_fields"})
"""Fields that clients add to a message for their own use (openai-python's parsed streams, litellm) and send back: they
never have an effect."""

MAX_METADATA = 16
"""As in the OpenAI API."""
_DROPPED = MESSAGE_NEUTRAL.keys() | MESSAGE_OWN
_UNIONS = frozenset({"content", "prompt", "stop"})
"""Fields of several shapes. Behind one's name stands the tag of the shape, which is no part of a field's name."""
_HIDDEN = "~"
"""First letter of these tags. A client's own field may begin so too, but stands nowhere behind such a name."""


B = TypeVar("B", bound=Body)


def parse(kind: type[B], value: dict[str, Any], config: Config) -> B:
    """The body as a model; InvalidRequest or Unsupported names the field and what was expected.

    All of it is read on the event loop, so what is too long is refused unread, and of what is wrong the first is told.
    """
    fields = kind.model_fields
    kept = {}
    for name, item in value.items():
        if name in fields:
            kept[name] = item
        elif issubclass(kind, Generation):
            _outside(name, item)
        else:
            raise InvalidRequest(f"{shown(name)} is not a field of this route", field=shown(name))
    _check_lengths(kept, config)
    if "messages" in kept:
        kept["messages"] = _strip_messages(kept["messages"])
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _explain(first["type"], first["loc"], first["msg"]) from None


def _check_lengths(fields: dict[str, Any], config: Config) -> None:
    limits = {
        "messages": config.max_messages,
        "tools": config.max_tools,
        "logit_bias": MAX_BIAS,
        "metadata": MAX_METADATA,
    }
    for name, most in limits.items():
        given = fields.get(name)
        if isinstance(given, list | dict) and len(given) > most:
            what = "entries" if isinstance(given, dict) else name
            raise InvalidRequest(f"{name} holds {len(given)} {what}; the limit is {most}", field=name)


def _strip_messages(messages: Any) -> Any:
    """Messages without the fields that ask for nothing; Unsupported where one asks for something."""
    if not isinstance(messages, list):
        return messages
    stripped = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or _DROPPED.isdisjoint(message):
            stripped.append(message)
            continue
        for name, neutral in MESSAGE_NEUTRAL.items():
            if name in message and message[name] not in neutral:
                field = f"messages[{index}].{name}"
                raise Unsupported(f"{field} is not built", field=field)
        stripped.append({name: item for name, item in message.items() if name not in _DROPPED})
    return stripped


def _outside(name: str, value: Any) -> None:
    """Let a field pass that the body does not have, if it is harmless or asks for nothing."""
    if name in HARMLESS:
        return
    if name not in NEUTRAL:
        raise InvalidRequest(f"{shown(name)} is not a field of this route", field=shown(name))
    if not any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL[name]):
        allowed = ", ".join("null" if neutral is None else repr(neutral) for neutral in NEUTRAL[name])
        raise Unsupported(f"{name} is not built yet; the only values accepted are {allowed}", field=name)


def _explain(kind: str, loc: tuple[int | str, ...], message: str) -> InvalidRequest:
    field = ""
    for before, part in pairwise(("", *loc)):
        if isinstance(part, int):
            field += f"[{part}]"
        elif before not in _UNIONS or not part.startswith(_HIDDEN):
            field += ("." if field else "") + shown(part)
    if kind == "missing":
        return InvalidRequest(f"{field} is missing", field=field)
    if kind == "extra_forbidden":
        return InvalidRequest(f"{field} is not a known field", field=field)
    if kind == "literal_error" and field.endswith(".type"):
        return Unsupported(f"{field}: {_lower(message)}; other types are not built yet", field=field)
    return InvalidRequest(f"{field}: {_lower(message)}", field=field)


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
