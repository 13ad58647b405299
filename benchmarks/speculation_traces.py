"""Sessions in the shape of public agent traces, made from this project's own files: given text, and generated text.

The shape follows published traces: an agent reads files with line numbers, edits by quoting old lines and writing new
ones, runs tests, and sums up; it rewrites whole files with a few changes; it calls tools with JSON; or it only talks.
Sessions are cut to a small model's context.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
KINDS = ("repair", "rewrite", "tools", "chat")
_THOUGHTS = (
    "The report says that {name} goes wrong, so I look at where it is defined before I change anything.",
    "That is the place. The condition is checked too late; I move the check in front of the loop in {name}.",
    "Before the edit I want to see who calls {name}, because a caller may depend on the order.",
    "The edit is in. Now the tests of this module, and only then those that use it.",
    "One test still expects the old message of {name}. It states the behaviour that was reported as wrong.",
    "Everything passes. The cause was in {name}: a value was compared before it was read.",
)
_ISSUE = (
    "{name} in {file} fails for an empty value. It should return early and say so. Please find the cause, mend it with "
    "as small a change as you can, and run the tests.\n"
)


class Part(NamedTuple):
    """A piece of a session."""

    said: bool
    """Whether the model generated it; otherwise it was given to it."""
    text: str


def sessions(kind: str, count: int) -> Iterator[list[Part]]:
    """Make sessions of a kind, the same ones each time."""
    chance = random.Random(kind)
    make = {"repair": _repair, "rewrite": _rewrite, "tools": _tools, "chat": _chat}[kind]
    for _ in range(count):
        yield make(chance)


def _source(chance: random.Random, lines: int) -> tuple[str, list[str], str]:
    """Return a module's path, some of its lines, and the name of a function in them."""
    files = sorted((ROOT / "src" / "cairn").rglob("*.py"))
    while True:
        file = chance.choice(files)
        whole = file.read_text().splitlines()
        if len(whole) < lines + 10:
            continue
        start = chance.randrange(len(whole) - lines)
        excerpt = whole[start : start + lines]
        names = [line.split("(")[0].split()[-1] for line in excerpt if line.lstrip().startswith("def ")]
        if names:
            return str(file.relative_to(ROOT)), excerpt, chance.choice(names)


def _numbered(lines: list[str], first: int = 1) -> str:
    return "".join(f"{number:5}\t{line}\n" for number, line in enumerate(lines, first))


def _changed(chance: random.Random, lines: list[str]) -> list[str]:
    """Return the lines with one replaced by two."""
    place = chance.randrange(len(lines))
    indent = " " * (len(lines[place]) - len(lines[place].lstrip()))
    value = chance.choice(("value", "found", "given", "current"))
    return [*lines[:place], f"{indent}if {value} is None:", f"{indent}    return {value}", *lines[place:]]


def _call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>\n"


def _repair(chance: random.Random) -> list[Part]:
    file, lines, name = _source(chance, 70)
    thoughts = [text.format(name=name) + "\n" for text in _THOUGHTS]
    place = chance.randrange(10, 50)
    old = lines[place : place + chance.randrange(4, 12)]
    hits = "".join(f"{file}:{place + 1}:{line}\n" for place, line in enumerate(lines) if name in line)
    test = f"tests/{file.removeprefix('src/cairn/').replace('/', '/test_')}"
    return [
        Part(False, "You repair a repository with the tools bash, view and str_replace.\n"),
        Part(False, _ISSUE.format(name=name, file=file)),
        Part(True, thoughts[0] + _call("bash", command=f"grep -n {name} -r src/cairn")),
        Part(False, hits),
        Part(True, thoughts[2] + _call("view", path=file, view_range=[1, len(lines)])),
        Part(False, _numbered(lines)),
        Part(
            True,
            thoughts[1]
            + _call("str_replace", path=file, old_str="\n".join(old), new_str="\n".join(_changed(chance, old))),
        ),
        Part(False, f"The file {file} was edited.\n{_numbered(_changed(chance, old), place + 1)}"),
        Part(True, thoughts[3] + _call("bash", command=f"python -m pytest {test} -q")),
        Part(False, f"1 failed, {chance.randrange(9, 60)} passed\nFAILED {test}::test_{name}_of_nothing\n"),
        Part(True, thoughts[4] + _call("bash", command=f"python -m pytest {test} -q -k test_{name}_of_nothing")),
        Part(False, f"{chance.randrange(9, 60)} passed\n"),
        Part(True, thoughts[5] + f" I changed {file}: {name} returns early now.\n"),
    ]


def _rewrite(chance: random.Random) -> list[Part]:
    file, lines, name = _source(chance, 55)
    first = _changed(chance, lines)
    second = [line.replace(name, name + "_early") for line in _changed(chance, first)]
    return [
        Part(False, "You write whole files. Answer with the file and nothing else.\n"),
        Part(
            False, f"{file}:\n```python\n" + "\n".join(lines) + f"\n```\n{name} should return early. Write it anew.\n"
        ),
        Part(True, "```python\n" + "\n".join(first) + "\n```\n"),
        Part(False, f"Now call it {name}_early, and check once more.\n"),
        Part(True, "```python\n" + "\n".join(second) + "\n```\n"),
    ]


def _tools(chance: random.Random) -> list[Part]:
    nouns = ("invoice", "order", "parcel", "ticket", "account", "sensor", "booking")
    noun = chance.choice(nouns)
    parts = [
        Part(False, f"You answer questions about {noun}s with the tool find_{noun}. Sum up as a JSON list.\n"),
        Part(False, f"Which {noun}s of this week are open, and who has them?\n"),
    ]
    rows = []
    for number in chance.sample(range(10_000, 99_999), 4):
        row = {
            f"{noun}_id": f"{noun[:3].upper()}-{number}",
            "status": chance.choice(("open", "closed", "waiting")),
            "owner": chance.choice(("Ada", "Ben", "Chi", "Dora", "Eli")),
            "updated_at": f"2026-11-{chance.randrange(10, 28)}T{chance.randrange(10, 24)}:00:00Z",
            "amount": chance.randrange(100, 99_999) / 100,
        }
        rows.append(row)
        parts += [
            Part(True, _call(f"find_{noun}", **{f"{noun}_id": row[f"{noun}_id"], "fields": [*row], "limit": 1})),
            Part(False, json.dumps({"results": [row], "count": 1, "next": None}) + "\n"),
        ]
    return [*parts, Part(True, json.dumps(rows, indent=1) + "\n")]


def _chat(chance: random.Random) -> list[Part]:
    """Make questions and answers that repeat little: paragraphs of the documentation, each used once."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    text = chance.choice(pages).read_text().split("\n\n")
    prose = [part for part in text if len(part) > 200 and not {"|", "`", "#"} & set(part[:2]) and "|" not in part]
    if len(prose) < 4:
        return _chat(chance)
    start = chance.randrange(len(prose) - 3)
    question = prose[start].split(". ")[0]
    return [
        Part(False, "You are a helpful assistant.\n"),
        Part(False, f"{question}. Can you explain that?\n"),
        Part(True, prose[start + 1] + "\n"),
        Part(False, "And what follows from it?\n"),
        Part(True, prose[start + 2] + "\n"),
    ]
