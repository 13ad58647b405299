"""Safety checks of an untrusted tokenizer.json: bounds on the size of its output and on its time.

A normaliser that writes a thousand letters for each one takes all memory, a pattern like `(a+)+$` takes all time, and
the library reports some faults by a panic. So, before a tokenizer is used:

    growth     output bytes per input byte, computed from the file: more than `MAX_GROWTH` is refused
    patterns   each is tried on texts that make bad ones backtrack, in a process with bounds on time and memory
    panics     become errors, here and wherever the library is called later (`no_panic`)

The process is run as `python -m cairn.text.tokens.tokenizer_checks`. Verdicts are cached while the program runs.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cairn.system.helper_limits import restrict
from cairn.system.helper_process import helper_command, helper_environment
from cairn.types.errors import CairnError, ModelFileError

MAX_GROWTH = 256.0
"""Most output bytes per input byte of normalisers and pre-tokenisers. SentencePiece's NFKC table reaches 99, others
22."""
MAX_PREPENDED = 1024
MAX_ADDED = 1 << 16
"""Most added tokens; models have at most some 30,000, and each takes time at every start."""
MAX_STEPS = 1000
"""Most normaliser and pre-tokeniser steps together; each is a pass over the text."""
CPU_SECONDS = 5
"""Most processor time of one check; known tokenizers take some tenths of a second."""
WALL_SECONDS = 120.0
MEMORY = 1 << 30
"""Most bytes of address space of the process."""
PROBE = 4_096
"""Characters of a long probe: enough for a quadratic pattern to exceed the library's own limit of retries."""
SHORT_PROBE = 28
"""Characters of a short probe: enough for an exponential pattern never to return."""

_GROWTH = {"NFC": 3.0, "NFD": 4.0, "NFKC": 11.0, "NFKD": 11.0, "Lowercase": 1.5, "BertNormalizer": 4.0}
_GROWTH |= {"ByteLevel": 2.0, "Metaspace": 3.0}
"""Step type -> most output bytes per input byte, by Unicode's tables (UAX 15) and the byte alphabet."""


def growth(step: Mapping[str, Any] | None) -> float:
    """Return the most output bytes per input byte of a normaliser or pre-tokeniser in tokenizer.json's form."""
    if not isinstance(step, Mapping):
        return 1.0
    kind = step.get("type")
    if kind == "Sequence":
        parts = step.get("normalizers") or step.get("pretokenizers") or []
        return functools.reduce(lambda product, part: product * growth(part), parts, 1.0)
    if kind == "Replace":
        pattern, content = step.get("pattern"), len(str(step.get("content", "")).encode())
        literal = pattern.get("String") if isinstance(pattern, Mapping) else None
        # A pattern may match the empty text between any two characters.
        return max(1.0, content / len(literal.encode())) if isinstance(literal, str) and literal else 1.0 + content
    if kind == "Precompiled":
        return _charsmap_growth(step.get("precompiled_charsmap"))
    return _GROWTH.get(str(kind), 1.0)


def _charsmap_growth(encoded: object) -> float:
    """Return the growth of SentencePiece's table: the size of a trie in 4 bytes, the trie, then texts ended by 0."""
    try:
        data = base64.b64decode(str(encoded or ""), validate=True)
    except ValueError:
        return 1.0  # the library refuses such a table
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(1.0, *map(float, map(len, texts)))


def check_added(count: int, path: Path) -> None:
    """Raise ModelFileError above MAX_ADDED added tokens."""
    if count > MAX_ADDED:
        raise ModelFileError(f"{path}: has {count} added tokens; the limit is {MAX_ADDED}")


def steps(step: object) -> Iterator[Mapping[str, Any]]:
    """Yield all steps of a nested sequence."""
    if isinstance(step, Mapping):
        yield step
        for part in (*(step.get("normalizers") or ()), *(step.get("pretokenizers") or ())):
            yield from steps(part)


def _patterns(*parts: object) -> list[str]:
    found = [one.get("pattern") for part in parts for one in steps(part)]
    return [str(one["Regex"]) for one in found if isinstance(one, dict) and "Regex" in one]


def fault(normalizer: Mapping[str, Any] | None, pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """Return the fault of these parts of a tokenizer.json, as the end of a sentence; None if there is none.

    Raises OSError if the process cannot be started.
    """
    return _fault(json.dumps([normalizer, pre_tokenizer], sort_keys=True))


@functools.lru_cache(maxsize=64)
def _fault(parts: str) -> str | None:
    normalizer, pre_tokenizer = json.loads(parts)
    grown = growth(normalizer) * growth(pre_tokenizer)
    if grown > MAX_GROWTH:
        return f"its normaliser may make a text {grown:.4g} times as long; the limit is {MAX_GROWTH:g}"
    found = [one for part in (normalizer, pre_tokenizer) for one in steps(part)]
    if len(found) > MAX_STEPS:
        return f"its normaliser and pre-tokeniser have {len(found)} steps; the limit is {MAX_STEPS}"
    if any(len(str(one.get("prepend", ""))) > MAX_PREPENDED for one in found):
        return f"it puts more than {MAX_PREPENDED} characters before every text"
    patterns = _patterns(normalizer, pre_tokenizer)
    if not patterns and not any(one.get("type") == "Precompiled" for one in found):
        return None
    return _probed(parts, patterns)


def _probed(parts: str, patterns: list[str]) -> str | None:
    run = subprocess.Popen(
        helper_command("cairn.text.tokens.tokenizer_checks"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=helper_environment(),
        process_group=0,
    )
    with run:
        try:
            out, _ = run.communicate(parts.encode(), timeout=WALL_SECONDS)
        except subprocess.TimeoutExpired:
            run.kill()
            out = b""
    lines = out.decode("utf-8", "replace").splitlines()
    last = lines[-1] if lines else ""
    if last == "ok":
        return None
    if last.isdecimal() and int(last) < len(patterns):
        return f"its pattern {patterns[int(last)]!r:.200} takes too long or fails on a text made to try it"
    return "its normaliser or pre-tokeniser takes too long, too much memory, or fails on a text made to try it"


def probes(pattern: str) -> Iterator[str]:
    """Yield texts that a bad pattern matches for long before it fails: runs of one kind of character or of its own."""
    own = [*dict.fromkeys(one for one in pattern if one.isalnum())][:16]
    kinds = dict.fromkeys([*"aA0 \n\t.-'", "é", "中", *own])
    tail = "\x01!" + "\x01".join(["0A a.", *own]) + "\x01"
    # The tail holds one of each, because the library does not try a pattern whose last letter is absent.
    pairs = [first + second for first, second in zip(kinds, [*kinds][1:], strict=False)]
    for size in (SHORT_PROBE, PROBE):
        for unit in (*kinds, *pairs):
            yield unit * (size // len(unit)) + tail


@contextlib.contextmanager
def no_panic(error: Callable[[str], CairnError]) -> Iterator[None]:
    """Raise `error(reason)` instead of a panic of the library, which is not an Exception."""
    try:
        yield
    except BaseException as panic:
        if type(panic).__module__ != "pyo3_runtime":
            raise
        raise error(" ".join(str(panic).split())[:200]) from None


def main() -> None:
    """Try the parts of a tokenizer.json from stdin; print each pattern's number, then `all`, and `ok` at the end."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    restrict(memory=MEMORY, seconds=CPU_SECONDS)
    normalizer, pre_tokenizer = json.loads(sys.stdin.buffer.read())
    patterns = _patterns(normalizer, pre_tokenizer)
    for number, pattern in enumerate(patterns):
        print(number, flush=True)
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        for text in probes(pattern):
            split.pre_tokenize_str(text)
    print("all", flush=True)
    empty: dict[str, Any] = {
        "model": {"type": "BPE", "vocab": {}, "merges": []},
        "added_tokens": [],
        "post_processor": None,
    }
    whole = {"version": "1.0", "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": None, **empty}
    made = Tokenizer.from_str(json.dumps(whole))
    for text in probes("".join(patterns)):
        made.encode(text, add_special_tokens=False)
    print("ok", flush=True)


if __name__ == "__main__":
    main()
