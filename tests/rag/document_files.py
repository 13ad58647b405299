"""Documents made in memory: PDFs of pages of text, DOCX of paragraphs."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
STYLES = (
    f'<w:styles xmlns:w="{W}"><w:style w:styleId="berschrift1"><w:name w:val="heading 1"/></w:style>'
    '<w:style w:styleId="Own"><w:name w:val="Mine"/><w:pPr><w:outlineLvl w:val="1"/></w:pPr></w:style></w:styles>'
)


def pdf(pages: Sequence[str], *, stream: bytes | None = None) -> bytes:
    """Return a PDF with a line of text on each page; `stream` replaces the drawing operators."""
    objects: dict[int, bytes] = {}
    kids = " ".join(f"{4 + 2 * at} 0 R" for at in range(len(pages)))
    objects[1] = b"<</Type/Catalog/Pages 2 0 R>>"
    objects[2] = f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>".encode()
    objects[3] = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"
    for at, text in enumerate(pages):
        number = 4 + 2 * at
        resources = "/Resources<</Font<</F1 3 0 R>>>>/MediaBox[0 0 612 792]"
        objects[number] = f"<</Type/Page/Parent 2 0 R{resources}/Contents {number + 1} 0 R>>".encode()
        drawn = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET".encode() if stream is None else stream
        objects[number + 1] = b"<</Length %d>>stream\n" % len(drawn) + drawn + b"\nendstream"
    data, places = b"%PDF-1.4\n", []
    for number, body in sorted(objects.items()):
        places.append(len(data))
        data += b"%d 0 obj\n" % number + body + b"\nendobj\n"
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    start = len(data)
    data += b"xref\n0 %d\n0000000000 65535 f \n" % (len(places) + 1) + table
    return data + b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(places) + 1, start)


def docx(body: str, *, head: str = "", styles: str = STYLES) -> bytes:
    """Return a DOCX with this body; `head` goes before its root."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as parts:
        parts.writestr("word/styles.xml", styles)
        parts.writestr("word/document.xml", f'{head}<w:document xmlns:w="{W}"><w:body>{body}</w:body></w:document>')
    return file.getvalue()


def paragraph(text: str, style: str = "") -> str:
    """Return a paragraph in two runs."""
    style = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    half = len(text) // 2
    runs = "".join(f'<w:r><w:t xml:space="preserve">{part}</w:t></w:r>' for part in (text[:half], text[half:]))
    return f"<w:p>{style}{runs}</w:p>"
