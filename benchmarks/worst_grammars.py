"""The cost of the worst grammars: each is compiled as a server does it; one that passes is followed for 1,000 tokens.

    .venv/bin/python benchmarks/worst_grammars.py [MODEL] [--tokens 1000]

MODEL is a model's folder or file, of which only the vocabulary is used; by default it is the bundled model. First the
helper itself is measured: seconds until the first verdict, and memory. `holds` is the memory of a compiled grammar,
`grows` what following it adds, both as counted in a process of its own; `slowest` is the CPU time of its slowest mask,
which a step of all requests waits for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from cairn.models.hub.hub import locate
from cairn.system.helper_limits import bound_memory, cpu_seconds, memory_in_use
from cairn.text.chat.templates import load_text
from cairn.text.grammar.compile_parent import GrammarHelper
from cairn.text.grammar.compile_wire import MEMORY, Compile, GrammarVerdict
from cairn.text.grammar.grammar import Kind, Shape, Structure
from cairn.text.grammar.trial import Followed, follow
from cairn.text.grammar.vocabulary import TokenTable, compile_grammar, grammar_tokenizer, token_table

MIB = 1 << 20


class Row(NamedTuple):
    """The cost of one grammar."""

    verdict: GrammarVerdict
    followed: Followed | None


def _word(rng: random.Random, size: int) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(size))


def _object(count: int, value: object, *, needed: bool = False) -> dict[str, object]:
    names = [f"property_{n}" for n in range(count)]
    made: dict[str, object] = {"type": "object", "properties": {name: value for name in names}}
    return made | {"required": names if needed else [], "additionalProperties": False}


def _any_of(*values: object) -> dict[str, object]:
    return {"type": "array", "items": {"anyOf": [*values]}}


def _texts(count: int) -> str:
    """Return a grammar of this many patterns, all of which stay possible at every place of a text."""
    rng = random.Random(5)
    names = " | ".join(f"A{n}" for n in range(count))
    rules = [f"A{n}: /(.|\\n)*{_word(rng, 2)}(.|\\n){{{50 + n}}}X{n}/" for n in range(count)]
    return "\n".join([f"start: {names}", *rules]) + "\n"


def _ambiguous(most: int) -> str:
    return "start: s\ns: " + " | ".join("s " * n for n in range(2, most)) + ' | "a" | "b"\n'


def worst() -> dict[str, tuple[Kind, str]]:
    """Return the grammars by name."""
    rng, text = random.Random(3), {"type": "string"}
    schemas: dict[str, object] = {
        "any JSON": True,
        "an integer, multipleOf 99,991": {"type": "integer", "multipleOf": 99_991},
        "10 of them": _any_of(*({"type": "integer", "multipleOf": 99_991 - 2 * n} for n in range(10))),
        "8 of about 10,000": _any_of(*({"type": "integer", "multipleOf": 9_973 + 2 * n} for n in range(8))),
        "400 optional properties": _object(400, text),
        "4,000 optional properties": _object(4_000, text),
        "4,000 required properties": _object(4_000, text, needed=True),
        "a text of 100,000 characters at most": {"type": "string", "maxLength": 100_000},
        "400 texts of 500 characters at most": _object(400, {"type": "string", "maxLength": 500}),
        "400 patterns at once": _any_of(
            *({"type": "string", "pattern": f"^{_word(rng, 2)}.{{{100 + n},{500 + n}}}$"} for n in range(400))
        ),
        "a name in any script": _any_of({"type": "string", "pattern": r"^\p{L}[\p{L} '-]{1,80}$"}),
        "500 names in any script": {"type": "string", "pattern": r"^(\p{Lu}\p{Ll}{1,30} ?){1,500}$"},
        "60 patterns all at once": {
            "allOf": [{"type": "string", "pattern": f"a{{{n},{n + 900}}}b"} for n in range(60)]
        },
    }
    others: dict[str, tuple[Kind, str]] = {
        r"\p{L}{1,1000}\p{N}{1,1000}": ("regex", r"\p{L}{1,1000}\p{N}{1,1000}(\p{L}|\p{N}){1,2000}"),
        r"(.|\n)*a(.|\n){2000}": ("regex", r"(.|\n)*a(.|\n){2000}"),
        "100 patterns alive everywhere": ("lark", _texts(100)),
        "300 patterns alive everywhere": ("lark", _texts(300)),
        "s: s s": ("lark", 'start: s\ns: s s | "a" | "b" | "ab"\n'),
        "s: s s ... of up to 19": ("lark", _ambiguous(20)),
        "s: s s ... of up to 39": ("lark", _ambiguous(40)),
    }
    return {name: ("json", json.dumps(schema)) for name, schema in schemas.items()} | others


def followed(table: TokenTable, text: str, tokens: int) -> Followed:
    """Follow a grammar in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            if (base := memory_in_use()) is not None:
                bound_memory(base + 4 * MEMORY)
            tokenizer = grammar_tokenizer(table)
            matcher = compile_grammar(tokenizer, text)
            matcher.compute_bitmask()
            result = follow(matcher, tokenizer.eos_tokens, tokens, until=cpu_seconds() + 10)
            os.write(writing, msgspec.json.encode(result))
        finally:
            os._exit(0)
    os.close(writing)
    data = b""
    while piece := os.read(reading, 1 << 16):
        data += piece
    os.close(reading)
    os.waitpid(child, 0)
    return msgspec.json.decode(data, type=Followed)


async def rows(table: TokenTable, tokens: int, tell: Callable[[str, Row], None], names: list[str]) -> None:
    """Try each grammar, and follow those that pass."""
    helper = GrammarHelper(lambda _: table)
    try:
        began = time.monotonic()
        first = await helper.compile(Compile(vocab=(), text='start: "a"'), "", "")
        status = Path(f"/proc/{helper.pid}/status").read_text()
        held = {name: int(status.partition(name + ":")[2].split()[0]) >> 10 for name in ("RssAnon", "VmHWM")}
        print(f"the helper: first verdict after {time.monotonic() - began:.2f} s, {held} MiB", flush=True)
        assert not first.ended
        for name in names:
            kind, text = worst()[name]
            job = Compile(vocab=(), shape=Shape(structure=Structure(kind=kind, text=text)))
            verdict = await helper.compile(job, "", "")
            tell(name, Row(verdict, None if verdict.ended else followed(table, verdict.text, tokens)))
    finally:
        await helper.close()


def line(name: str, row: Row) -> str:
    """Return a line of the table."""
    verdict, cost = row
    if cost is None:
        why = verdict.error if verdict.ended == "wrong" else f"too much {verdict.ended.replace('seconds', 'time')}"
        why = why.partition(";")[0].partition(" (")[0]
        return f"| {name} | refused: {why} | {verdict.seconds:.2f} s | - | - | - | - |"
    ended = cost.error.removeprefix("lexer error: ").removeprefix("parser error: ").partition(" (")[0]
    ended = ended.partition(":")[0].lower() or "goes on"
    slowest = 1e3 * cost.slowest if math.isfinite(cost.slowest) else 0.0
    figures = f"{verdict.bytes / MIB:.1f} MiB | {cost.grown / MIB:.1f} MiB | {cost.tokens} | {slowest:.1f} ms"
    return f"| {name} | {ended} | {verdict.seconds:.2f} s | {figures} |"


def table_of(model: str) -> TokenTable:
    """Return the tokens of a model."""
    tokenizer, _ = load_text(Path(locate(model)), None)
    return token_table(tokenizer, tokenizer.largest_id + 1, sorted(tokenizer.end_ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--tokens", type=int, default=1000)
    args = parser.parse_args()
    table = table_of(args.model)
    print(f"{len(table.tokens)} tokens")
    print("| grammar | what became of it | tried in | holds | grows | tokens | slowest |")
    print("|---|---|---|---|---|---|---|")
    asyncio.run(rows(table, args.tokens, lambda name, row: print(line(name, row), flush=True), [*worst()]))


if __name__ == "__main__":
    main()
