"""Token ids -> text, piece by piece; the pieces join to exactly the text that decoding all ids at once gives.

The decoders of tokenizer.json (the `tokenizers` library) come in three kinds, each streamed exactly in its own way:

    bytes    byte-level BPE: tokens are bytes; a character is passed on when its last byte has come
    runs     SentencePiece with byte fallback: a run of byte tokens is valid or invalid as a whole
    pieces   each token has a text of its own, but the first one may lose its leading space

Any other decoder is streamed by decoding a window of recent ids.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from tokenizers import Tokenizer as Library

V = TypeVar("V")

RUN_STEPS = ("Replace", "ByteFallback", "Fuse", "Strip")
"""Decoder steps of SentencePiece-style tokenizers, in the order for which `_RunDetokenizer` is exact."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
NEVER = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
"""Bytes that never occur in UTF-8."""
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A byte token of byte fallback."""


class Detokenizer(Protocol):
    """A streaming decoder of ids."""

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that is now certain; "" while a character is incomplete."""
        ...

    def flush(self) -> str:
        """Return the rest, incomplete bytes as U+FFFD. Nothing may be pushed afterwards."""
        ...


class _ByteDetokenizer:
    """Detokenizer for tokens that are bytes; every maximal invalid part of the UTF-8 is one U+FFFD."""

    __slots__ = ("_decoder", "_skip", "_table")

    def __init__(self, table: Mapping[int, bytes], skip: Collection[int]) -> None:
        self._table = table
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        table, skip = self._table, self._skip
        return self._decoder.decode(b"".join([table[i] for i in ids if i not in skip]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _RunDetokenizer:
    """Detokenizer for tokens that are texts or single bytes; `strip` leading spaces of the whole text are dropped.

    As in the library's ByteFallback, a run of byte tokens that is not valid UTF-8 as a whole becomes one U+FFFD per
    byte, so a run is passed on when it ends.
    """

    __slots__ = ("_run", "_skip", "_strip", "_table")

    def __init__(self, table: Mapping[int, str | int | None], skip: Collection[int], strip: int) -> None:
        self._table = table
        self._skip = skip
        self._strip = strip
        self._run = bytearray()

    def push(self, ids: Sequence[int]) -> str:
        pieces: list[str] = []
        for i in ids:
            if i in self._skip:
                continue
            piece = self._table[i]
            if piece is None:
                continue
            if isinstance(piece, int):
                self._run.append(piece)
                continue
            if self._run:
                pieces.append(self._end_run())
            pieces.append(piece)
        return self._stripped("".join(pieces)) if pieces else ""

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(" "):
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class _PieceDetokenizer:
    """Detokenizer for tokens whose text depends only on whether they are the first that is not skipped."""

    __slots__ = ("_first", "_first_text", "_skip", "_table")

    def __init__(
        self, first_text: Callable[[int], str], table: Mapping[int, str | None], skip: Collection[int], first: bool
    ) -> None:
        self._first_text = first_text
        self._table = table
        self._skip = skip
        self._first = first

    def push(self, ids: Sequence[int]) -> str:
        text = ""
        for i in ids:
            piece = None if i in self._skip else self._table[i]
            if piece is None:
                continue
            text += self._first_text(i) if self._first else piece
            self._first = False
        return text

    def flush(self) -> str:
        return ""


class _WindowDetokenizer:
    """Detokenizer for any other decoder: it decodes a window of recent ids with and without the new ones.

    It is exact if a token's text depends on at most the window before it.
    """

    __slots__ = ("_decode", "_ids", "_shown", "_skip")

    WINDOW = 8

    def __init__(self, decode: Callable[[Sequence[int]], str], skip: Collection[int], after: Sequence[int]) -> None:
        self._decode = decode
        self._skip = skip
        ids = [i for i in after if i not in skip][-self.WINDOW :]
        # If a character is incomplete at the border, it is unknown which part of it was shown.
        self._ids = [] if REPLACEMENT in decode(ids) else ids
        self._shown = len(self._ids)

    def push(self, ids: Sequence[int]) -> str:
        self._ids += [i for i in ids if i not in self._skip]
        return self._new(final=False)

    def flush(self) -> str:
        return self._new(final=True)

    def _new(self, *, final: bool) -> str:
        before = self._decode(self._ids[: self._shown])
        text = self._decode(self._ids)
        end = len(self._ids)
        if text.endswith(REPLACEMENT) and not final:
            if end - self._shown <= self.WINDOW:
                return ""
            # So many tokens cannot be one incomplete character: without this, all of them would be decoded every time.
            end = self._certain(text)
            text = self._decode(self._ids[:end])
        if self._shown > 4 * self.WINDOW:
            cut = self._shown - self.WINDOW
            del self._ids[:cut]
            end -= cut
        self._shown = end
        return text[len(before) :]

    def _certain(self, text: str) -> int:
        """Return how many of the ids, whose text is `text`, come before a possibly incomplete character.

        Such a character has at most three bytes so far; the cut splits no character.
        """
        size = len(self._ids)
        cuts = range(size - 3, size)
        return next((n for n in cuts if self._decode(self._ids[:n]) + self._decode(self._ids[n:]) == text), size)


class Decoding:
    """Decoding of one tokenizer's ids, by the kind of its decoder in tokenizer.json."""

    def __init__(self, library: Library, decoder: dict[str, Any] | None) -> None:
        """Take the library's tokenizer and `decoder`, the parsed JSON of tokenizer.json."""
        self._library = library
        steps = _steps(decoder)
        self._kind = _kind(steps)
        self._fallback = any(step["type"] == "ByteFallback" for step in steps)
        self._strip = sum(int(step["start"]) for step in steps if step["type"] == "Strip")
        self._replace = [
            (str(step["pattern"].get("String")), str(step["content"])) for step in steps if step["type"] == "Replace"
        ]
        self._bytes = _Memo(self._spelt_bytes)
        self._runs = _Memo(self._run_piece)
        self._pieces = _Memo(self._inner_piece)

    def stream(self, skip: Collection[int], after: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer that leaves out the ids in `skip` and continues the text of `after`."""
        if self._kind == "bytes":
            return _ByteDetokenizer(self._bytes, skip)
        if self._kind == "runs":
            return _RunDetokenizer(self._runs, skip, 0 if _any_text(after, skip, self._runs) else self._strip)
        if self._kind == "pieces":
            first = not _any_text(after, skip, self._pieces)
            return _PieceDetokenizer(self._first_piece, self._pieces, skip, first)
        return _WindowDetokenizer(lambda ids: str(self._library.decode(ids, skip_special_tokens=False)), skip, after)

    def missing_bytes(self) -> frozenset[int]:
        """Return the bytes of UTF-8 that a byte-level vocabulary lacks: encoding drops them."""
        if self._kind != "bytes":
            return frozenset()
        lacking = {byte for character, byte in _BYTES.items() if self._library.token_to_id(character) is None}
        return frozenset(lacking - NEVER)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token in the middle of a text; b"" for an unknown id."""
        if self._kind == "bytes":
            return self._bytes[token]
        if self._kind == "runs":
            piece = self._runs[token]
            return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()
        return (self._pieces[token] or "").encode()

    def _spelt_bytes(self, token: int) -> bytes:
        text = self._library.id_to_token(token) or ""
        try:
            return bytes([_BYTES[character] for character in text])
        except KeyError:  # an added token, which is not written in the byte alphabet
            return text.encode()

    def _run_piece(self, token: int) -> str | int | None:
        text: str | None = self._library.id_to_token(token)
        if text is None:
            return None
        if self._fallback and BYTE_TOKEN.fullmatch(text):
            return int(text[3:5], 16)
        for pattern, content in self._replace:
            text = text.replace(pattern, content)
        return text

    def _first_piece(self, token: int) -> str:
        return self._join([self._library.id_to_token(token) or ""])

    def _inner_piece(self, token: int) -> str | None:
        text = self._library.id_to_token(token)
        return None if text is None else self._join(["x", text])[len(self._join(["x"])) :]

    def _join(self, tokens: list[str]) -> str:
        decoder = self._library.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode(tokens))


def _any_text(ids: Sequence[int], skip: Collection[int], table: Mapping[int, object]) -> bool:
    """Return whether any of the ids is text: neither skipped nor unknown."""
    return any(i not in skip and table[i] is not None for i in ids)


class _Memo(dict[int, V]):
    """A table that computes an entry on its first use."""

    def __init__(self, compute: Callable[[int], V]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, key: int) -> V:
        value = self[key] = self._compute(key)
        return value


def _byte_alphabet() -> dict[str, int]:
    """Return character -> byte of GPT-2's byte-level alphabet.

    Printable bytes are themselves, the rest follow from U+0100.
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(rest)}


_BYTES = _byte_alphabet()


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the decoders of a (nested) sequence, in order."""
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _kind(steps: list[dict[str, Any]]) -> str:
    """Return which detokenizer is exact for these decoders: "bytes", "runs", "pieces" or "window"."""
    kinds = [step["type"] for step in steps]
    bare = [kind for kind in kinds if kind != "Fuse"]
    if bare == ["ByteLevel"]:
        return "bytes"
    if not bare or bare in (["Metaspace"], ["WordPiece"]):
        return "pieces"
    places = [RUN_STEPS.index(kind) if kind in RUN_STEPS else -1 for kind in kinds]
    strips = [step for step in steps if step["type"] == "Strip"]
    understood = (
        -1 not in places
        and places == sorted(places)
        and all("String" in step["pattern"] for step in steps if step["type"] == "Replace")
        and all(step["content"] == " " and step["stop"] == 0 for step in strips)
        and (not strips or (len(strips) == 1 and "Fuse" in kinds))
    )
    return "runs" if understood else "window"
