"""The process that reads one document, its standard input; run as `python -m cairn.rag.extraction KIND`.

It writes one frame to its standard output (`Extracted`, as msgpack) and ends. Whatever the file does to it - endless
loops, bombs, faults of a parser - costs this process alone: the system bounds its memory and its processor time, and
the parent (`extractor.py`) kills it when it has waited long enough. It can write no file.
"""

from __future__ import annotations

import os
import sys
from typing import BinaryIO, cast

import msgspec

from cairn.rag.definition import MAX_BYTES, DocumentKind
from cairn.rag.outline import Section, UnreadableDocument
from cairn.system.helper_limits import restrict

MEMORY = 1 << 30
"""Bytes of address space that reading one document may take."""
SECONDS = 120
"""Seconds of processor time that reading one document may take."""


class Extracted(msgspec.Struct, frozen=True):
    """What was read: the sections, or why there are none."""

    sections: list[Section] = []
    error: str = ""


def extract(kind: DocumentKind, file: BinaryIO) -> Extracted:
    """Read a document."""
    try:
        found = _sections(kind, file)
    except UnreadableDocument as error:
        return Extracted(error=str(error))
    except MemoryError:
        return Extracted(error=f"reading the document takes more than {MEMORY >> 20} MiB of memory, the limit")
    except RecursionError:
        return Extracted(error="the document nests too deeply")
    except Exception as error:  # a parser's fault over a broken file is the file's
        return Extracted(error=f"the document is broken: {' '.join(str(error).split())[:200] or type(error).__name__}")
    size = sum(len(one.heading) + len(one.text) for one in found)
    if size > MAX_BYTES:
        return Extracted(error=f"the document's text has {size} characters; the limit is {MAX_BYTES}")
    return Extracted(found)


def _sections(kind: DocumentKind, file: BinaryIO) -> list[Section]:
    if kind == "pdf":
        from cairn.rag.pdf import pages

        return pages(file)
    if kind == "docx":
        from cairn.rag.docx import paragraphs

        return paragraphs(file)
    from cairn.rag.reading import sections

    try:
        text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableDocument(f"the document is no text in UTF-8: byte {error.start} is none of it") from None
    return sections(text, kind)


def main() -> None:
    """Read the document on the standard input."""
    sys.set_int_max_str_digits(1000)
    restrict(memory=MEMORY, seconds=SECONDS)
    found = extract(cast(DocumentKind, sys.argv[1]), sys.stdin.buffer)
    data = memoryview(msgspec.msgpack.encode(found))
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
