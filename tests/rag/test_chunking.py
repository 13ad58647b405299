"""Documents' structure, and the chunks they are split into."""

from __future__ import annotations

import random
import time
from itertools import islice

import pytest

from cairn.rag import chunking
from cairn.rag.chunking import MAX_TITLE, Outline, Section, UnreadableDocument, chunks, sections

MARKDOWN = """Before.

# Cairns

A heap of stones.

## Paths ##

They mark paths.

```
# no heading
```

# Bread
Flour.
"""
HTML = """<html><head><title>No</title><style>p {}</style><body><script>evil()</script>
<h1>Cairns &amp; <b>paths</b></h1><p>A heap
 of   stones.</p><p>They mark paths.</p><h2>Old</h2><ul><li>One<li>Two</ul><h1>Bread</h1><pre>a
  b</pre>"""


def test_markdown_is_read_by_its_headings() -> None:
    assert sections(MARKDOWN, "md") == [
        Section("", "Before."),
        Section("Cairns", "A heap of stones."),
        Section("Cairns > Paths", "They mark paths.\n\n```\n# no heading\n```"),
        Section("Bread", "Flour."),
    ]


def test_html_is_read_without_hidden_parts() -> None:
    assert sections(HTML, "html") == [
        Section("Cairns & paths", "A heap of stones.\n\nThey mark paths."),
        Section("Cairns & paths > Old", "One\n\nTwo"),
        Section("Bread", "a\n  b"),
    ]
    assert sections("  \n", "txt") == [] and sections(" x ", "txt") == [Section("", "x")]


def test_html_headings_without_an_end_lose_no_text() -> None:
    assert sections("<p>A<h1>One<p>two<p>three<h2>Four</h2>five<h2>six", "html") == [
        Section("", "A"),
        Section("", "One\n\ntwo\n\nthree"),
        Section("Four", "five"),
        Section("Four", "six"),
    ]
    assert sections("<h1><div>One</div><div>two</div></h1>three", "html") == [Section("One two", "three")]


def test_chunks_have_all_of_a_text_and_are_no_longer_than_they_may_be() -> None:
    rng = random.Random(1)
    for _ in range(300):
        words = [rng.choice(["a", "stone", "cairn.", "path,\n\n", "x" * rng.randint(1, 60)]) for _ in range(200)]
        text = " ".join(words).strip()
        most = rng.randint(100, 400)
        overlap = rng.randint(0, most // 2)
        results = [piece.text for piece in chunks([Section("h", text)], most, overlap)]
        assert all(0 < len(piece) <= most for piece in results)
        at = covered = 0
        for piece in results:
            at = text.index(piece, at)
            assert not text[covered:at].strip(), "a part of the text is in no chunk"
            covered = max(covered, at + len(piece))
        assert not text[covered:].strip()


def test_headings_take_no_longer_than_they_are() -> None:
    began = time.process_time()
    for line in ("# a" + " " * 1_200 + "b", "# " + "\t" * 100_000 + "a", "# a" + " #" * 1_200 + "b"):
        sections(f"{line}\ntext", "md")
    assert time.process_time() - began < 1.0
    for line, title in (("#  a \t##\t ", "a"), ("   ## #a# b ", "#a# b"), ("# #", ""), ("#\ta#", "a"), ("#", None)):
        (section,) = sections(f"{line}\ntext", "md")
        assert section == (Section("", f"{line}\ntext") if title is None else Section(title, "text"))


def test_repeated_headings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = Outline()
    for level in range(1, 1000):
        levels.head(level, f"{level} " + "x" * 1000)
    levels.add("text")
    assert MAX_TITLE == 200 and [len(part) for part in levels.sections[0].heading.split(" > ")] == [200] * 9
    monkeypatch.setattr(chunking, "MAX_CHUNKS", 3)
    assert len(sections("# a\ntext\n" * 3, "md")) == 3
    with pytest.raises(UnreadableDocument, match="more than 3 sections"):
        sections("# a\ntext\n" * 4, "md")


def test_the_number_of_chunks_is_bounded() -> None:
    """A text may be crafted so that its chunks begin a letter apart, so they are counted while they are made."""
    breaks = ["\n\n", "\n", ". ", "? ", "! ", "; ", ", ", " "]
    text = "".join("x" * 40 + one for one in breaks) * 20_000
    made = islice(chunks([Section("", text)], 100, 50), 1_000)
    assert len(list(made)) == 1_000
