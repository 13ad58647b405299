"""The text of a PDF, a section for each page. It is read in a process of its own (`extraction.py`): the files come from
anybody, and a page may take any time or memory."""

from __future__ import annotations

import logging
from typing import BinaryIO

from cairn.rag.definition import MAX_PAGES
from cairn.rag.outline import Section, UnreadableDocument


def pages(file: BinaryIO) -> list[Section]:
    """The pages that hold text, in order. Unreadable says what is wrong with the file."""
    from pypdf import PasswordType, PdfReader
    from pypdf.errors import PyPdfError

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it tells of each small fault, and most files have some
    try:
        reader = PdfReader(file)
        if reader.is_encrypted and reader.decrypt("") is PasswordType.NOT_DECRYPTED:
            raise UnreadableDocument("the PDF is encrypted with a password; give it without one")
        count = len(reader.pages)
        if count > MAX_PAGES:
            raise UnreadableDocument(f"the PDF has {count} pages; the limit is {MAX_PAGES}")
        found = [
            Section(f"page {number}", text)
            for number, page in enumerate(reader.pages, 1)
            if (text := page.extract_text().strip())
        ]
    except (PyPdfError, ImportError) as error:  # ciphers of newer files are in a package of their own
        raise UnreadableDocument(f"the PDF cannot be read: {_line(error)}") from None
    if count and not found:
        raise UnreadableDocument(
            "no page of the PDF holds text: pictures of text, as a scanner makes them, are not read"
        )
    return found


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
