"""The base of all request bodies: the strict model, JSON reading, and shapes that several fields share.

Numbers are only typed here. `frontend/request_options.py` checks their ranges, and with `parse` the lengths of lists.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from cairn.api.http.call import GZIP, HTTPCall, shown
from cairn.config.config import Config
from cairn.text.output.json_scan import MAX_SCALAR
from cairn.text.tokens.tokenizer import valid_text
from cairn.types.errors import Forbidden, InvalidRequest, UnsupportedMedia

INLINE_BYTES = 1 << 18
"""Largest body parsed on the event loop, which takes some ms. Larger ones go to threads, one at a time of a tenant."""


async def read_nothing(call: HTTPCall, config: Config) -> dict[str, Any]:
    """Return the JSON object in the body, {} if there is no body. The caller refuses any field."""
    body = await call.body()
    if not body:
        check_origin(call)
        return {}
    _check_headers(call)
    return await _parsed(call, body, config)


async def read_json(call: HTTPCall, config: Config) -> dict[str, Any]:
    """Return the body, which must be a JSON object with a JSON content type."""
    _check_headers(call)
    return await _parsed(call, await call.body(), config)


async def read_list(call: HTTPCall, config: Config, name: str) -> dict[str, Any]:
    """Return the body, a JSON list or an object with the list under `name`, as that object."""
    _check_headers(call)
    body = (await call.body()).removeprefix(codecs.BOM_UTF8).strip()
    listed = body.startswith(b"[")
    return await _parsed(call, b'{"' + name.encode() + b'":' + body + b"}" if listed else body, config)


async def read_plain(call: HTTPCall, config: Config) -> dict[str, Any]:
    """Return the body, which must be a JSON object whatever its content type: clients of Ollama send none.

    Browsers send such a body without a preflight, so the page's origin is checked.
    """
    if not is_json(call):
        check_origin(call)
    _check_coding(call)
    return await _parsed(call, await call.body(), config)


def is_json(call: HTTPCall) -> bool:
    """Return whether the content type is JSON, for which browsers ask the server first."""
    return (call.header(b"content-type") or b"").partition(b";")[0].strip().lower() == b"application/json"


def check_origin(call: HTTPCall) -> None:
    """Raise Forbidden for a web page that may not call.

    Browsers send a request without a body, or a form, without the preflight that JSON needs.
    """
    origin = (call.header(b"origin") or b"").decode("latin-1")
    if not origin or call.header(b"sec-fetch-site") in (b"same-origin", b"none"):
        return
    host = (call.header(b"host") or b"").decode("latin-1")
    if origin.partition("://")[2] != host and not call.admits(origin):
        raise Forbidden(
            f"pages of {shown(origin)} may not call this server; allow them with --cors-origins, or send {{}} as JSON"
        )


async def _parsed(call: HTTPCall, body: bytes, config: Config) -> dict[str, Any]:
    def parsed() -> dict[str, Any]:
        return parse_json(body, max_depth=config.max_json_depth, max_values=config.max_json_values, warn=call.warn)

    return parsed() if len(body) <= INLINE_BYTES else await call.long.run(call.share, parsed)


def _check_headers(call: HTTPCall) -> None:
    if not is_json(call):
        raise UnsupportedMedia("the content-type must be application/json", field="Content-Type")
    _check_coding(call)


def _check_coding(call: HTTPCall) -> None:
    if call.coding not in (b"identity", *GZIP):
        raise UnsupportedMedia("the body may be compressed with gzip only", field="Content-Encoding")


def _unheard(sentence: str) -> None:
    """Ignore a warning."""


def parse_json(
    body: bytes, *, max_depth: int, max_values: int = 1 << 18, warn: Callable[[str], None] = _unheard
) -> dict[str, Any]:
    """Return the object in a request body.

    Raises InvalidRequest for anything but an object; for invalid UTF-8 or JSON (RFC 8259: no NaN or Infinity); a key
    given twice; nesting deeper than `max_depth` (the outermost object is 1); more than `max_values` objects, lists and
    members, or more than an eighth as many objects, which would take 20 times the body's memory and block the event
    loop; a number beyond a 64-bit float, or a whole number of more than `MOST_DIGITS` digits.

    Half a surrogate pair, which no UTF-8 text can hold, becomes U+FFFD, and `warn` gets a sentence: clients that cut
    texts at a number of UTF-16 units send it with every later turn.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    if has_more([body], max_values):
        raise InvalidRequest(f"the request body holds more than {max_values} JSON values, the limit")
    most = max(LEAST_OBJECTS, max_values // VALUES_AN_OBJECT)
    if body.count(b"{") > most and _count(_BRACES, body, most) > most:
        raise InvalidRequest(f"the request body holds more than {most} JSON objects, the limit")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the request body is not valid UTF-8 at byte {error.start}") from None
    try:
        value = (_careful_decoder if _has_long_number(body) else _decoder)(text)
    except _Twice as error:
        raise InvalidRequest(f"the request body gives the key {_short(error.key)} twice in one object") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    except _LongNumber:
        raise InvalidRequest(
            f"the request body holds a whole number of more than {MOST_DIGITS} digits, the limit; send it as a text"
        ) from None
    except _Constant as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the request body must be a JSON object")
    if _mend(value, max_depth):
        warn("the body holds half a surrogate pair, which is not a character: it becomes U+FFFD")
    return value


def _up_to(marks: str, count: int) -> re.Pattern[bytes]:
    """Return the pattern of the next `count` marks outside of texts and what is before them.

    It never backtracks, so a scan takes linear time, and counts without making an object for each mark.
    """
    text = r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)'
    return re.compile(rf'(?:[^"{marks}]*+(?:{text}[^"{marks}]*+)*+[{marks}]){{{count}}}+'.encode(), re.DOTALL)


_BLOCK = 1_024
"""Marks counted at once."""
_VALUES = _up_to(r"\[{,", _BLOCK), _up_to(r"\[{,", 1)
"""Patterns of commas and opening brackets, of which a body has at least as many as it has members and containers."""
_BRACES = _up_to("{", _BLOCK), _up_to("{", 1)


def _count(patterns: tuple[re.Pattern[bytes], re.Pattern[bytes]], body: bytes, most: int) -> int:
    """Count marks outside of texts; return a number above `most` as soon as it is exceeded."""
    found, at = 0, 0
    for pattern, size in zip(patterns, (_BLOCK, 1), strict=True):
        while found <= most and (next := pattern.match(body, at)) is not None:
            found, at = found + size, next.end()
    return found


LEAST_OBJECTS = 1_024
"""Objects that any body may hold."""
VALUES_AN_OBJECT = 8
"""JSON values for each object that a body may hold: objects take far longer to make."""


def has_more(bodies: Sequence[bytes], limit: int) -> bool:
    """Return whether the bodies hold together more than `limit` JSON values.

    Counts commas and opening brackets outside of strings, which bounds the number of containers and members. Each body
    is scanned by itself: a string left open ends with it. Bodies with few such marks cost three scans at memory speed.
    """
    if sum(body.count(mark) for body in bodies for mark in (b",", b"[", b"{")) <= limit:
        return False
    left = limit
    for body in bodies:
        left -= _count(_VALUES, body, left)
        if left < 0:
            return True
    return False


MOST_DIGITS = MAX_SCALAR
"""Most digits of a whole number, as in calls that a model writes: Python converts them in quadratic time."""
_STRIDE = MOST_DIGITS // 2


def _has_long_number(body: bytes) -> bool:
    """Return whether more than `MOST_DIGITS` digits stand in a row: then one of these slices has nothing else."""
    return any(body[at : at + _STRIDE].isdigit() for at in range(0, len(body), _STRIDE))


def _short_integer(digits: str) -> int:
    if len(digits.removeprefix("-")) > MOST_DIGITS:
        raise _LongNumber
    return int(digits)


class _LongNumber(Exception):
    """A whole number of more than `MOST_DIGITS` digits."""


class _Twice(Exception):
    def __init__(self, key: str) -> None:
        self.key = key


class _Constant(ValueError):
    """NaN, Infinity or -Infinity."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Twice(key)
            seen.add(key)
    return found


def _constant(name: str) -> None:
    raise _Constant(f"{name} is not a JSON number")


_decoder: Callable[[str], Any] = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant).decode
_careful_decoder: Callable[[str], Any] = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_constant, parse_int=_short_integer
).decode
"""The same for bodies with a long row of digits; it calls Python for each whole number."""


def _mend(value: Any, max_depth: int) -> bool:
    """Check depth and numbers and repair half surrogates; return whether there were any."""
    level = [value]
    depth = 0
    mended = False
    while level:
        depth += 1
        if depth > max_depth:
            raise _too_deep(max_depth)
        below = []
        for container in level:
            if isinstance(container, dict):
                if not all(map(_is_whole, container)):
                    mended = True
                    _mend_keys(container)
                items: Iterable[tuple[Any, Any]] = container.items()
            else:
                items = enumerate(container)
            halves = []
            for place, item in items:
                kind = type(item)
                if kind is str:
                    if not _is_whole(item):
                        halves.append(place)
                elif kind is dict or kind is list:
                    below.append(item)
                elif kind is float and not math.isfinite(item):
                    raise InvalidRequest("the request body holds a number beyond the range of a 64-bit float")
            for place in halves:
                mended = True
                container[place] = valid_text(container[place])
        level = below
    return mended


def _mend_keys(container: dict[str, Any]) -> None:
    items = [(valid_text(key), item) for key, item in container.items()]
    container.clear()
    for key, item in items:
        if key in container:
            raise InvalidRequest(f"the request body gives the key {_short(key)} twice in one object")
        container[key] = item


def _is_whole(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _too_deep(limit: int) -> InvalidRequest:
    return InvalidRequest(f"the request body is nested deeper than {limit} levels, the limit")


def _short(key: str) -> str:
    shown = key if len(key) <= 40 else key[:40] + "..."
    return repr(shown.encode("utf-8", "replace").decode())


Place = Literal[
    "request",
    "messages",
    "responses",
    "ollama",
    "options",
    "model",
    "embedding",
    "tokenize",
    "stream_options",
    "message",
    "part",
    "prediction",
    "tool",
    "function",
    "call",
    "called",
    "other",
]
"""The kind of object that a field stands in."""


class Body(BaseModel):
    """Strict: no field but these, no number written as text."""

    # Built at its first use: the bodies of all routes would take an eighth of a start.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)
    place: ClassVar[Place] = "other"
    within: ClassVar[dict[str, type[Body]]] = {}
    """The fields that hold such bodies, one or a list of them."""
    lenient: ClassVar[bool] = False
    """Whether unknown fields are ignored, with a warning in a header."""
    synonyms: ClassVar[Mapping[str, str]] = {}
    """Other names of fields, used if the field's own is absent."""
    attached: ClassVar[str] = ""
    """The field whose messages or items may hold images and files."""

    @classmethod
    def usual(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return the object in its usual form, if clients write it in other forms too."""
        return value


def _whole(value: Any) -> Any:
    """Convert 4.0 to 4: some clients send all numbers as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


T = TypeVar("T")
Several = Annotated[list[T], Field(fail_fast=True)]
"""A list that is read up to its first error: collecting those of a long one would hold everybody up."""


def text_or_list(value: Any) -> str | None:
    """Return the discriminator tag of a field that is a text or a list; None for anything else."""
    return "~text" if isinstance(value, str) else "~list" if isinstance(value, list) else None


Number = float | None
Count = Annotated[int | None, BeforeValidator(_whole)]
Stop = Annotated[
    Annotated[str, Tag("~text")] | Annotated[Several[str], Tag("~list")],
    Discriminator(text_or_list, custom_error_type="stop", custom_error_message="must be a text or a list of texts"),
]


def _prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "~text"
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    if isinstance(first, str):
        return "~texts"
    return "~batch" if isinstance(first, list) else "~tokens"


Prompt = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[Several[str], Tag("~texts")]
    | Annotated[Several[int], Tag("~tokens")]
    | Annotated[Several[Several[int]], Tag("~batch")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt",
        custom_error_message="must be a text, a list of texts, a list of token ids or a list of such lists",
    ),
]
