"""Images, sound and files in messages: the model reads text, so a text with their digest replaces them.

Agents send their whole history with every turn. An attachment that was refused once would be refused in every later
turn, so it is replaced wherever it stands, with a warning in X-Cairn-Warning. The one exception is what a user has just
sent and nobody has answered: there an error is better than an answer that ignores the image. `--images text` replaces
that too.

The text depends on the bytes alone, or on the address of an attachment that is not sent itself. Nothing is fetched.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cairn.api.http.body import Body
from cairn.api.http.call import HTTPCall, encode
from cairn.config.config import Config
from cairn.types.errors import InvalidRequest, Unsupported

KINDS: Mapping[str, str] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "input_audio": "sound",
    "audio_url": "sound",
    "video_url": "video",
    "document": "file",
    "file": "file",
    "input_file": "file",
}
"""Types of a message's parts that are not text, in all dialects, with their names in texts."""
INLINE = 1 << 16
"""Most characters that are digested on the event loop."""
_DATA = ("data", "file_data")
"""Fields that hold an attachment in base64."""
_ADDRESSES = ("url", "file_url", "file_id")
"""Fields with the address of an attachment, which may be the attachment itself: `data:...`."""
_RESULTS = ("function_call_output", "custom_tool_call_output", "tool_result")
_ANSWERS = ("reasoning", "function_call", "custom_tool_call")


class LeftOut(NamedTuple):
    """A part that is no text."""

    holder: list[Any]
    """The list of parts that holds it."""
    place: int
    where: str
    kind: str
    item: int
    """The message or item that it belongs to."""
    given: Any
    """The part itself."""

    @property
    def size(self) -> int:
        """About how many characters there are to digest."""
        return len(_payload(self.given)[1])

    @property
    def text(self) -> str:
        """The text that replaces it."""
        return f"[{self.kind} {digest(self.given)} left out: this model reads text]"


async def leave_out(call: HTTPCall | None, kind: type[Body], body: dict[str, Any], config: Config) -> None:
    """Replace a body's attachments by texts.

    Raises Unsupported for one that a user has just sent, unless `config.images` is "text".
    """
    items = body.get(kind.attached)
    found = list(_found(items, kind.attached)) if isinstance(items, list) else []
    images = body.get("images") if kind.attached == "prompt" else None
    found += _in_list(images, "images", 0)
    if not found:
        return
    if config.images != "text" and (newest := _newest(items)) is not None:
        for one in found:
            if one.item == newest:
                raise Unsupported(
                    f"{one.where} is {_article(one.kind)}, and this model reads text: leave it out, or have the server "
                    "put a text in its place (cairn serve --images text)",
                    field=one.where,
                )
    if sum(one.size for one in found) <= INLINE:
        texts = [one.text for one in found]
    else:
        texts = await asyncio.to_thread(lambda: [one.text for one in found])
    for one, text in zip(found, texts, strict=True):
        one.holder[one.place] = {"type": "text", "text": text} if isinstance(one.given, dict) else text
    _join(body, items, images)
    if call is not None:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        call.warn(f"{found[0].where} is left out{more}: this model reads only text and gets {texts[0]} in its place")


def digest(given: Any) -> str:
    """Return eight hexadecimal digits of SHA-256 over an attachment's bytes, or over its address."""
    return hashlib.sha256(_bytes(given)).hexdigest()[:8]


def _newest(items: Any) -> int | None:
    """Return the index of the item in which a user has the last word.

    No answer follows it, and no tool result stands beside it: agents send files they read as tool results.
    """
    if not isinstance(items, list):
        return 0
    newest: int | None = None
    for index in range(len(items) - 1, -1, -1):
        item = items[index]
        if not isinstance(item, dict):
            continue
        if item.get("role") == "assistant" or item.get("type") in _ANSWERS:
            break
        if item.get("role") == "tool" or item.get("type") in _RESULTS or _holds_result(item):
            return None
        if newest is None and item.get("role") == "user":
            newest = index
    return newest


def _holds_result(item: Mapping[str, Any]) -> bool:
    content = item.get("content")
    return isinstance(content, list) and any(isinstance(one, dict) and one.get("type") in _RESULTS for one in content)


def _found(items: list[Any], field: str) -> Iterator[LeftOut]:
    """Yield every attachment of messages or items."""
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            continue
        where = f"{field}[{index}]"
        for name in ("content", "output"):
            if isinstance(parts := item.get(name), list):
                yield from _in_parts(parts, f"{where}.{name}", index)
        yield from _in_list(item.get("images"), f"{where}.images", index)


def _in_parts(parts: list[Any], where: str, item: int) -> Iterator[LeftOut]:
    for index, part in enumerate(parts):
        if not isinstance(part, dict):
            continue
        at, kind = f"{where}[{index}]", part.get("type")
        if kind == "tool_result" and isinstance(inner := part.get("content"), list):
            yield from _in_parts(inner, f"{at}.content", item)
        elif isinstance(kind, str) and kind in KINDS and not _is_text(part):
            yield LeftOut(parts, index, at, KINDS[kind], item, part)


def _in_list(images: Any, where: str, item: int) -> Iterator[LeftOut]:
    """Yield Ollama's images: base64 texts in a list of their own."""
    for index, image in enumerate(images if isinstance(images, list) else ()):
        at = f"{where}[{index}]"
        if not isinstance(image, str):
            raise InvalidRequest(f"{at} must be an image in base64", field=at)
        yield LeftOut(images, index, at, "image", item, image)


def _is_text(part: Mapping[str, Any]) -> bool:
    """Return whether a part is an Anthropic document that holds text."""
    source = part.get("source")
    return isinstance(source, dict) and source.get("type") in ("text", "content")


def _join(body: dict[str, Any], items: Any, images: Any) -> None:
    """Append Ollama's images, which come in a list of their own, to the texts that they belong to."""
    prompt = body.get("prompt")
    if isinstance(images, list) and isinstance(prompt, str | None):
        body["prompt"] = "\n".join([*filter(None, [prompt]), *images])
        del body["images"]
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and isinstance(texts := item.get("images"), list):
            content = item.get("content")
            item["content"] = "\n".join([*([content] if isinstance(content, str) and content else []), *texts])
            del item["images"]


def _bytes(given: Any) -> bytes:
    name, text = _payload(given)
    head, comma, data = text.partition(",")
    if comma and head.startswith("data:"):
        return _decoded(data) if head.endswith(";base64") else data.encode("utf-8", "replace")
    if name in _DATA:
        return _decoded(text)
    return text.encode("utf-8", "replace") if name else encode(given)


def _payload(given: Any) -> tuple[str, str]:
    """Return the name and the text of the field with an attachment's data or address; both empty if there is none."""
    if isinstance(given, str):
        return "data", given
    for holder in (given.get("source"), given.get(str(given.get("type"))), given.get("image_url"), given):
        if isinstance(holder, str):
            return "url", holder
        if isinstance(holder, Mapping):
            for name in (*_DATA, *_ADDRESSES):
                if isinstance(text := holder.get(name), str):
                    return name, text
    return "", ""


def _decoded(text: str) -> bytes:
    """Decode base64, however it is broken into lines; return the text's own bytes if it is none."""
    raw = text.encode("utf-8", "replace").translate(_PLAIN)
    for padding in (b"", b"=", b"=="):
        try:
            return binascii.a2b_base64(raw + padding)
        except binascii.Error:
            continue
    return raw


_PLAIN = bytes.maketrans(b"-_", b"+/")
"""The letters of base64 in addresses as those of plain base64."""


def _article(kind: str) -> str:
    return {"image": "an image", "sound": "sound"}.get(kind, f"a {kind}")
