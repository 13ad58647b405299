"""The size and plainness of the code, beside the targets: python tools/house.py [--trace]

Counts the package's files and lines, its import circles, the docstrings that begin with a verb and the words per
sentence of the docs. Where a target is missed, the reason and what was tried follow the table. `--trace` also starts a
server with the bundled model, sends one chat and one agent's turn, and counts the files that each enters, in all
processes together. `--list circles|openings|files` prints the places behind a figure.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "cairn"
PLACES = ("chat", "turn")
MOST = {"chat": 85, "turn": 98}
"""Target for the files that a request enters, by kind."""
GROWTH = (
    "the targets were set for a server on one CPU, which had 394 files and 77,000 lines. Kernels of torch, Triton and "
    "MLX, ranks, clusters, adapters, guessed tokens and quantization came since, with their tests. Files were joined "
    "where the result stays about one subject and within some 500 lines."
)
"""Why the package is larger than was planned."""
ENTERED = (
    "the targets came with the plan to join files, and the block pool, write-behind and the front stayed one file a "
    "subject instead. Guessed tokens, adapters and the shared store added 12 files to each path. A chat enters the "
    "token log's files because its answer is kept for exact replay."
)
"""Why a request enters more files than was planned."""
NO_VERBS = frozenset(
    re.findall(
        r"\w+",
        """
        a an the this that these those its their his her our your whose what which who whom when where
        why how whether if one two three four all each every any some no none both such so as and or but
        not nothing nobody only it they he she there here for in on at by of to from with without behind
        beside below above between after before until while everything something another other others
        more most many much few less same new old first last own is are was were has have had does did
        will may might can could must should
        """,
    )
)
"""Words that begin no imperative sentence."""
TRACE = """
import sys, threading, os, time
MARK, OUT, SOURCE = {mark!r}, {out!r}, {source!r}
seen = set()
def entered(frame, event, argument):
    if event == "call" and (name := frame.f_code.co_filename).startswith(SOURCE):
        seen.add(name)
def watch():
    phase = ""
    while True:
        time.sleep(0.05)
        try:
            now = open(MARK).read()
        except OSError:
            continue
        if now != phase:
            if phase and not phase.startswith("-"):
                with open(os.path.join(OUT, phase + "." + str(os.getpid())), "w") as out:
                    out.write("\\n".join(seen.copy()))
            seen.clear()
            phase = now
def main():
    if any("cairn" in part for part in sys.orig_argv):
        threading.setprofile(entered)
        sys.setprofile(entered)
        threading.Thread(target=watch, daemon=True).start()
main()
"""
"""Program for each process of the traced server: records which files of the package are entered while the mark says
so.
"""


def modules() -> dict[str, Path]:
    """Return the package's modules by dotted name."""
    results = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        results[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return results


def imports(known: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return what each module imports of the package, also under TYPE_CHECKING and in functions."""
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        graph[name] = wanted = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                wanted.update(alias.name for alias in node.names if alias.name in known)
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                wanted.update(one if one in known else node.module for one in inner if node.module in known)
        wanted.discard(name)
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other in a circle (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    results: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph.get(name, ())):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                results.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for name in sorted(graph):
        if name not in index:
            visit(name)
    return sorted(results)


def folders(graph: Mapping[str, set[str]], known: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return which folders import which; the package's own root is left out."""

    def folder(name: str) -> str:
        return ".".join(known[name].relative_to(SOURCE.parent).parts[:-1])

    results: dict[str, set[str]] = {}
    for name, wanted in graph.items():
        results.setdefault(folder(name), set()).update(folder(one) for one in wanted)
    for name, others in results.items():
        others -= {name, "cairn"}
    results.pop("cairn", None)
    return results


def openings(known: Mapping[str, Path]) -> Iterator[tuple[str, str, str]]:
    """Yield (place, name, first word) of each function's docstring; properties are noun phrases and are left out."""
    for path in known.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            marks = {getattr(one, "attr", getattr(one, "id", "")) for one in node.decorator_list}
            text = ast.get_docstring(node)
            if text and not marks & {"property", "cached_property", "setter"}:
                word = re.split(r"[\s,.:;]", text.strip(), maxsplit=1)[0]
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.name, word


def is_verb(word: str) -> bool:
    """Return whether a docstring's first word can be an imperative: a capitalised word that opens no noun phrase."""
    lower = word.lower()
    plain = re.fullmatch(r"[A-Z][a-z]+(?:-[a-z]+)?", word) is not None
    third = lower.endswith("s") and not lower.endswith(("ss", "us", "ress", "is"))
    return plain and not third and lower not in NO_VERBS and not lower.endswith(("ing", "ed", "tion", "ly", "ity"))


def sentences() -> list[int]:
    """Return the words of each sentence in docs/*.md and the README, without code, tables and headings."""
    counts = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        lines = [re.sub(r"^\s*(?:[-*]|\d+\.)\s+", "\n", line) for line in text.splitlines()]
        kept = "\n".join(line for line in lines if not line.lstrip().startswith(("|", "#", "!", ">")))
        kept = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", kept))
        for paragraph in re.split(r"\n\s*\n|\n(?=\n)", kept):
            for sentence in re.split(r"(?<=[.?!])\s+", paragraph.replace("\n", " ")):
                if (words := len(re.findall(r"[\w'%-]+", sentence))) > 1:
                    counts.append(words)
    return counts


def trace() -> dict[str, set[str]]:
    """Return the files that a chat and an agent's turn enter, each the second of its kind, in all processes."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        mark, out = folder / "mark", folder / "out"
        out.mkdir()
        python = _traced_python(folder, mark, out)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [python, "-m", "cairn", "serve", "demo", "--port", str(port)]
        command += ["--agents-dir", str(folder / "agents"), "--kv-dir", str(folder / "kv")]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder)
        try:
            return _requests(server, f"http://127.0.0.1:{port}", mark, out)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def _traced_python(folder: Path, mark: Path, out: Path) -> str:
    """Make an environment whose every process runs TRACE, over this one's packages; return its python."""
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = str(folder / "venv" / "bin" / "python")
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    packages = [one for one in sys.path if one.endswith("site-packages")]
    (site / "house_trace.py").write_text(TRACE.format(mark=str(mark), out=str(out), source=str(SOURCE)))
    (site / "house_trace.pth").write_text("\n".join([str(ROOT / "src"), *packages, "import house_trace", ""]))
    return python


def _requests(server: subprocess.Popen[bytes], base: str, mark: Path, out: Path) -> dict[str, set[str]]:
    """Send each request once unseen and once seen, and collect what the processes recorded."""

    def post(path: str, body: object) -> None:
        data = json.dumps(body).encode()
        asked = urllib.request.Request(base + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=120) as answer:
            answer.read()

    deadline = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(base + "/health/ready", timeout=5).read()
            break
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline or server.poll() is not None:
                raise
            time.sleep(0.2)
    post("/v1/agents", {"id": "house", "system": "Be brief."})
    asked = {"messages": [{"role": "user", "content": "Hello, what is Cairn?"}], "stream": True, "max_tokens": 20}
    results: dict[str, set[str]] = {}
    for name, path in zip(PLACES, ("/v1/chat/completions", "/v1/agents/house/turns"), strict=True):
        post(path, asked)
        time.sleep(1)
        for phase in (name, f"-{name}"):
            mark.with_suffix(".new").write_text(phase)
            os.replace(mark.with_suffix(".new"), mark)
            time.sleep(0.5)
            if phase == name:
                post(path, asked)
                time.sleep(0.5)
        noted = [one.read_text().split("\n") for one in out.glob(f"{name}.*")]
        results[name] = {line for lines in noted for line in lines if line and not line.endswith("__init__.py")}
    return results


def table(
    known: Mapping[str, Path],
    rings: list[list[str]],
    folder_rings: list[list[str]],
    words: list[tuple[str, str, str]],
    entered: Mapping[str, set[str]],
) -> Iterator[str]:
    """Yield the lines of the table, then the reason for each target that does not hold."""
    plain = [path for path in known.values() if path.name != "__init__.py"]
    lines = sum(len(path.read_text().splitlines()) for path in known.values())
    tests = sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    largest, count = Counter(path.parent.relative_to(SOURCE) for path in plain).most_common(1)[0]
    long = sum(len(path.read_text().splitlines()) > 500 for path in plain)
    said = sentences()
    verbs = sum(is_verb(word[2]) for word in words) / len(words)
    mean, above = sum(said) / len(said), sum(one > 30 for one in said) / len(said)
    rows: list[tuple[str, float, str, float, str]] = [
        ("Python files in src/cairn, without `__init__`", len(plain), f"{len(plain)}", 330, GROWTH),
        ("files in the largest folder", count, f"{count} ({largest})", 24, ""),
        ("files above 500 lines", long, f"{long}", math.inf, ""),
        ("lines of src", lines, f"{lines:,}", 73_000, GROWTH),
        ("lines of tests", tests, f"{tests:,}", 68_000, GROWTH),
        ("import circles of modules", len(rings), f"{len(rings)}", 0, ""),
        ("import circles of folders", len(folder_rings), f"{len(folder_rings)}", 0, ""),
        ("function docstrings that do not begin with a verb", 1 - verbs, f"{1 - verbs:.0%} of {len(words):,}", 0.1, ""),
        ("words a sentence in the docs", mean, f"{mean:.1f}", 19, ""),
        ("sentences above 30 words", above, f"{above:.0%}", 0.1, ""),
    ]
    for name in entered:
        rows.append((f"files that a {name} enters", len(entered[name]), f"{len(entered[name])}", MOST[name], ENTERED))
    yield "| what | figure | target, at most |\n|---|---|---|"
    for label, _, figure, target, _ in rows:
        most = "few" if target == math.inf else f"{target:.0%}" if 0 < target < 1 else f"{target:,}"
        yield f"| {label} | {figure} | {most} |"
    missed: dict[str, list[str]] = {}
    for label, value, _, target, why in rows:
        if value > target:
            missed.setdefault(why, []).append(label)
    for why, names in missed.items():
        yield f"\n{'; '.join(names)}: {why or 'no reason is known.'}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="start a server and count the files that requests enter")
    parser.add_argument("--list", choices=("circles", "openings", "files"), help="print what stands behind a figure")
    chosen = parser.parse_args()
    known = modules()
    graph = imports(known)
    rings = circles(graph)
    folder_rings = circles(folders(graph, known))
    words = [*openings(known)]
    entered = trace() if chosen.trace else {}
    if chosen.list == "circles":
        print(*(" <-> ".join(ring) for ring in [*rings, *folder_rings]), sep="\n")
    elif chosen.list == "openings":
        print(*(" ".join(word) for word in words if not is_verb(word[2])), sep="\n")
    elif chosen.list == "files":
        print(
            *(f"{name} {Path(one).relative_to(SOURCE)}" for name in entered for one in sorted(entered[name])), sep="\n"
        )
    if chosen.list:
        return
    for line in table(known, rings, folder_rings, words, entered):
        print(line)


if __name__ == "__main__":
    main()
