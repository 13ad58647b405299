"""Bodies of multipart/form-data (RFC 7578) with one file, which goes to the disk while it arrives."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from cairn.api.http.body import check_origin
from cairn.api.http.call import HTTPCall, shown
from cairn.config.config import Config
from cairn.types.errors import InvalidRequest, TooLarge, Unavailable

MAX_FIELDS = 64
MAX_FIELD_BYTES = 64 << 10
"""Most bytes of all fields other than files, with their names and headers."""
MEDIA = b"multipart/form-data"


class Upload(NamedTuple):
    """A form with its file."""

    fields: dict[str, str]
    file: BinaryIO
    """From its beginning; a file of the disk without a name."""
    filename: str
    size: int


def is_form(call: HTTPCall) -> bool:
    """Return whether the body is a form."""
    return (call.header(b"content-type") or b"").partition(b";")[0].strip().lower() == MEDIA


@contextlib.asynccontextmanager
async def upload(call: HTTPCall, config: Config, folder: Path, most: int) -> AsyncIterator[Upload]:
    """Yield the form in the body, with one file of at most `most` bytes. The file is deleted afterwards.

    Raises InvalidRequest or TooLarge if the body is no such form, Forbidden for a web page that may not send it:
    browsers send forms without a preflight.
    """
    check_origin(call)
    kind, options = parse_options_header(call.header(b"content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != MEDIA or not 1 <= len(boundary) <= 70:
        raise InvalidRequest("the content-type must be multipart/form-data with a boundary", field="Content-Type")
    reader = _PartReader(most)
    try:
        with tempfile.TemporaryFile(dir=folder if folder.is_dir() else None) as file:
            reader.file = file
            parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": reader.begin,
                    "on_header_field": reader.header_name,
                    "on_header_value": reader.header_value,
                    "on_header_end": reader.header_end,
                    "on_headers_finished": reader.headers,
                    "on_part_data": reader.data,
                    "on_part_end": reader.end,
                    "on_end": reader.over,
                },
            )
            try:
                async for piece in call.pieces():
                    parser.write(piece)
                    if len(reader.waiting) > 1 << 20:
                        await asyncio.to_thread(reader.flush)
            except FormParserError as error:
                raise InvalidRequest(f"the form is broken: {str(error)[:200]}") from None
            reader.flush()
            if not reader.whole:
                raise InvalidRequest("the form ended before its last boundary")
            if reader.filename is None:
                raise InvalidRequest("file is missing: the form must hold a file", field="file")
            file.seek(0)
            yield Upload(reader.fields, file, reader.filename, reader.size)
    except OSError as error:
        raise Unavailable(f"the file cannot be kept: {error.strerror or error}", retry_after=10.0) from error


class _PartReader:
    """Collects the parts that the parser finds."""

    def __init__(self, most: int) -> None:
        self.file: BinaryIO
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0
        self.whole = False
        self.waiting = bytearray()
        """Bytes of the file that are not written yet."""
        self._most = most
        self._spent = 0
        self._head: tuple[bytearray, bytearray] = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._value: bytearray | None = None

    def begin(self) -> None:
        """Begin a part."""
        self._headers, self._value = {}, None

    def header_name(self, data: bytes, start: int, end: int) -> None:
        """Take a piece of a header's name."""
        self._spend(end - start)
        self._head[0].extend(data[start:end])

    def header_value(self, data: bytes, start: int, end: int) -> None:
        """Take a piece of a header's value."""
        self._spend(end - start)
        self._head[1].extend(data[start:end])

    def header_end(self) -> None:
        """Store a complete header."""
        name, value = self._head
        self._headers[bytes(name).lower()] = bytes(value)
        self._head = bytearray(), bytearray()

    def headers(self) -> None:
        """Decide, once all headers of a part are read, whether it is a field or the file."""
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if not self._name:
            raise InvalidRequest("a part of the form has no name")
        filename = options.get(b"filename")
        if filename is None:
            if len(self.fields) >= MAX_FIELDS:
                raise InvalidRequest(f"the form has more than {MAX_FIELDS} fields, the limit")
            if self._name in self.fields:
                raise InvalidRequest(f"the form gives {shown(self._name)} twice", field=shown(self._name))
            self._value = bytearray()
        elif self._name != "file" or self.filename is not None:
            raise InvalidRequest("the form must hold one file, named file", field=shown(self._name))
        else:
            told = filename.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
            self.filename = "".join(char for char in told if char.isprintable())[:256] or "file"

    def data(self, data: bytes, start: int, end: int) -> None:
        """Take a piece of a part."""
        if self._value is not None:
            self._spend(end - start)
            self._value.extend(data[start:end])
            return
        self.size += end - start
        if self.size > self._most:
            raise TooLarge(f"file has more than {self._most} bytes, the limit of a document", field="file")
        self.waiting += memoryview(data)[start:end]

    def end(self) -> None:
        """Store a complete part."""
        if self._value is not None:
            try:
                self.fields[self._name] = self._value.decode("utf-8")
            except UnicodeDecodeError:
                raise InvalidRequest(f"{shown(self._name)} is no text in UTF-8", field=shown(self._name)) from None

    def over(self) -> None:
        """Note the last boundary."""
        self.whole = True

    def flush(self) -> None:
        """Write what waits."""
        self.file.write(self.waiting)
        self.waiting = bytearray()

    def _spend(self, size: int) -> None:
        self._spent += size
        if self._spent > MAX_FIELD_BYTES:
            raise TooLarge(f"the fields of the form have more than {MAX_FIELD_BYTES} bytes, the limit")
