"""docs/performance.md and its charts, from the figures of the benchmarks.  `python benchmarks/report.py [--check]`

`docs/performance/` holds the figures: `cpu.json` of vs_llama_cpp.py, `http.json` of serving.py, `footprint.json` of
footprint.py, `overhead.json` of server_overhead.py, `agents-day.json` of agents_day.py (each with `--json`);
`*-avx2.json` and `*-zen5.json` are from two other machines. Everything above the mark in the page is generated from
them, so it cannot drift; the text below it is written by hand and kept. The charts need matplotlib. `--check` only
compares the page.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
MARK = "<!-- below: by hand -->"
CHART, HTTP_CHART, DAY_CHART = "performance.png", "performance-http.png", "performance-agents-day.png"

Figures = dict[str, Any]

METHOD = """\
How fast Cairn is beside llama.cpp, on one machine, in one run. Only ratios travel: the figures of two systems were
taken in turns, seconds apart, and the ratio of a row is the median of its rounds' ratios. The tables are made by
`python benchmarks/report.py` from `docs/performance/*.json`; the scripts that measured say in their first lines how."""

CPU_METHOD = """\
Both sides compute the same GGUF file: random weights of a real shape, quantised by llama.cpp itself (Q4_0 and Q8_0 in
every matrix, Q4_K_M in its usual mixture). Decode is greedy and in steps, each token fed back; `8 at 1,024` are 8
sequences with 1,024 tokens of context each. A ratio in bold reaches its goal."""

HTTP_METHOD = """\
One client process asks one server at a time, all of them on the same file with the same threads. It asks for streamed
completions, 128 tokens in and 64 out, no two prompts alike, every answer checked to be a success of the asked length.
The ratio of tok/s is higher, that of the time to the first token (TTFT) lower where Cairn is faster; a ratio in bold
reaches its goal. Where 16 connections ask, the better of llama-server's two configurations counts."""

BESIDE_METHOD = """\
A prompt of 128 new tokens is asked half a second after one of 4,000 on another connection: seconds until its first
token and until its 16th, and until the first token of the long one."""

KNOWN_METHOD = """\
Time to the first token in ms. `beside the first`: on another connection while the first is still being answered. After
a restart Cairn loads what it stored by itself; llama-server computes again unless a slot was saved and is restored by
hand (the time of both calls is given)."""

DAY_METHOD = """\
Agents with an instruction in common take their turns, each bringing what a tool put out; half way through the day the
server is killed (-9) and started again. How it is measured stands below, under "A day of agents: the method"."""


# --------------------------------------------------------------------------------------------------------- parts


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def machine_text(figures: Figures) -> str:
    one = figures["machine"]
    limits = [
        f"reads {one['read'] / 1e9:.0f} GB/s from memory",
        f"does {one['arithmetic'] / 1e9:,.0f} GFLOP/s in float32",
    ]
    limits += [f"{one[key] / 1e9:,.0f} {unit}" for key, unit in PEAKS.items() if one.get(key)]
    return (
        f"{one['cpu']}, {one['cores']} cores ({', '.join(one['sets'])}), {one['memory'] / 2**30:.0f} GiB; "
        f"{one['threads']} threads. Measured by `cairn bench`'s probe, it {', '.join(limits[:-1])} and {limits[-1]}. "
        f"Cairn computed with its `{one['kernels']}` kernels. Processes that wanted a core before the run: "
        f"{one['load']:.1f}."
    )


PEAKS = {"int8": "GOP/s in int8", "bf16": "GFLOP/s in bfloat16"}


def middle(row: Figures, side: str) -> float:
    return statistics.median(row[side])


def verdict(ratio: float, goal: float, *, below: bool = False) -> str:
    reached = ratio <= goal if below else ratio >= goal
    return f"**{ratio:.2f}x**" if reached else f"{ratio:.2f}x"


def peer_text(figures: Figures) -> str:
    peer = figures["llama.cpp"]
    has = re.findall(r"(\w+) = 1", peer["system"])
    return f"llama.cpp: llama-cpp-python {peer['version']}, built for this machine ({', '.join(has)})."


def speeds(row: Figures) -> tuple[str, ...]:
    """Return a row's file, case, and the speed of each side."""
    sides = (f"{middle(row, side):,.0f}" for side in ("cairn", "llama"))
    return f"{row['shape']} {row['kind']}", row["name"], *sides


SPEEDS = ("file", "work", "Cairn tok/s", "llama.cpp tok/s", "ratio")


def summary(figures: Figures) -> str:
    faster = sum(row["ratio"] > 1 for row in figures["rows"])
    rounds = f"rounds: {figures['rounds']}, steps of a decode row in each: {figures['steps']}"
    return f"in {faster} of {len(figures['rows'])} rows Cairn is the faster one ({rounds})"


def cpu_text(figures: Figures) -> str:
    parts = ["## Computing", CPU_METHOD, peer_text(figures), goals_text(figures)]
    parts.append(f"![Cairn's speed divided by llama.cpp's, row by row]({CHART})")
    parts += ["### What was read at most", ceilings(figures), "### The same answers, memory and loading"]
    parts.append(
        "Before any speed, both sides answered the same prompts. Compared are the largest difference of the twenty "
        "best log-probabilities of a step, and how many greedy tokens of the steps compared were equal (all where "
        "llama.cpp's best token led by more than that difference). Memory is the peak of the whole process, with the "
        "KV of its largest row. Loading is until the engine could compute, with the file in the page cache, Cairn's "
        "weights packed anew."
    )
    files = [
        (
            f"{file['shape']} {file['kind']} ({file['bytes'] / 1e9:.2f} GB)",
            f"{file['check']['largest']:.3f}",
            f"{file['check']['same']} of {file['check']['steps']}",
            f"{file['peak']['cairn'] / 1e9:.2f} / {file['peak']['llama'] / 1e9:.2f}",
            f"{file['load_seconds']['cairn']:.1f} / {file['load_seconds']['llama']:.1f}",
        )
        for file in figures["files"]
    ]
    head = ("file", "difference", "equal", "peak GB: Cairn / llama.cpp", "seconds to load")
    parts.append(table(head, files))
    return "\n\n".join(parts)


def goals_text(figures: Figures) -> str:
    """Return every row and its goal."""
    rows = [(*speeds(row), verdict(row["ratio"], row["goal"]), f"{row['goal']:g}x") for row in figures["rows"]]
    reached = sum(row["ratio"] >= row["goal"] for row in figures["rows"])
    return f"{table((*SPEEDS, 'goal'), rows)}\n\n{reached} rows reach their goal, {summary(figures)}."


def zen5_text(figures: Figures) -> str:
    """Return the same for the kind of machine that the goals are set for."""
    return "\n\n".join(("## Computing on Zen 5", machine_text(figures), peer_text(figures), goals_text(figures)))


def avx2_text(figures: Figures) -> str:
    """Return the same for a machine without goals: they are for AVX-512."""
    rows = [(*speeds(row), f"{row['ratio']:.2f}x") for row in figures["rows"]]
    parts = ["## Computing without AVX-512", machine_text(figures), peer_text(figures), table(SPEEDS, rows)]
    said = summary(figures)
    return "\n\n".join((*parts, f"{said[0].upper()}{said[1:]}. The goals above are of machines with AVX-512."))


def ceilings(figures: Figures) -> str:
    """Return how near decode is to the memory's limit: bytes read per step, and the share of the bandwidth."""
    read = figures["machine"]["read"]
    sizes = {(file["shape"], file["kind"]): file["bytes"] for file in figures["files"]}
    rows = []
    for row in figures["rows"]:
        if row["work"] != "decode":
            continue
        size = sizes[row["shape"], row["kind"]]
        most = row["size"] * read / size
        ours, theirs = (middle(row, side) / most for side in ("cairn", "llama"))
        rows.append((f"{row['shape']} {row['kind']}", row["name"], f"{most:,.0f}", f"{ours:.0%}", f"{theirs:.0%}"))
    text = (
        "A decode step reads every matrix once, whatever the number of sequences: the file's bytes divided by the "
        "machine's bandwidth bound it from below. KV is not counted here, nor arithmetic, which binds from about 16 "
        "sequences on."
    )
    return text + "\n\n" + table(("file", "work", "most tok/s", "Cairn", "llama.cpp"), rows)


def http_text(figures: Figures) -> str:
    parts = ["## Over HTTP", HTTP_METHOD, run_text(figures), load_table(figures["load"])]
    parts.append(f"![Cairn's server beside llama-server, row by row]({HTTP_CHART})")
    parts += ["### A context that is known", KNOWN_METHOD, known_table(figures)]
    if figures.get("beside"):
        parts += ["### A short prompt beside a long one", BESIDE_METHOD, beside_table(figures)]
    starts = "; ".join(f"{name} {seconds:.1f} s" for name, seconds in figures["start_seconds"].items())
    again = (
        f"{name} {one['ready again']:.1f} s"
        for name in NAMES
        for one in figures["context"][:2]
        if one["server"] == name
    )
    parts.append(f"From the command to ready, model loaded: {starts}. The next start: {'; '.join(again)}.")
    peaks = "; ".join(f"{name} {size / 1e9:.2f}" for name, size in figures["peak"].items())
    parts.append(f"Peak memory of all processes of a server after all of this, in GB: {peaks}.")
    return "\n\n".join(parts)


def other_http_text(figures: Figures, heading: str) -> str:
    """Return the same for another machine."""
    parts = [heading, run_text(figures), load_table(figures["load"])]
    return "\n\n".join((*parts, known_table(figures)))


def run_text(figures: Figures) -> str:
    load = f"{figures['machine']['load']:.1f} before and {figures['load_after']:.1f} after the run"
    return f"qwen3-0.6b {figures['type']}, rounds: {figures['rounds']}. Processes that wanted a core: {load}."


GOALS = {1: (1.5, 0.4), 4: (4.0, 0.3), 16: (5.0, 0.2)}
"""Connections -> least tok/s, largest TTFT, as multiples of llama-server's."""
PREFIX_GOAL = 0.060
"""Seconds to the first token behind a cached prefix."""
KNOWN_GOALS = {("context", "new"): 0.35}
"""(part, key) -> largest TTFT, as a multiple of llama-server's."""

NAMES = {"cairn": "Cairn", "llama-server, 8 slots": "llama-server"}
"""Servers of the second table."""


def load_ratios(load: list[Figures], connections: int) -> tuple[dict[str, list[Figures]], float, float]:
    """Return each server's rounds, and Cairn's tok/s and TTFT relative to llama-server's better configuration.

    The ratios are medians over the rounds.
    """
    seen: dict[str, list[Figures]] = {}
    for one in load:
        if one["connections"] == connections:
            seen.setdefault(one["server"], []).append(one)
    peers = [name for name in seen if name.startswith("llama-server")]
    best = max(peers, key=lambda name: statistics.median(one["tok_s"] for one in seen[name]))
    pairs = list(zip(seen["cairn"], seen[best], strict=True))
    faster, sooner = (statistics.median(a[key] / b[key] for a, b in pairs) for key in ("tok_s", "ttft_p50"))
    return seen, faster, sooner


def load_table(load: list[Figures]) -> str:
    rows = []
    for connections, (speed_goal, first_goal) in GOALS.items():
        seen, faster, sooner = load_ratios(load, connections)
        for name, rounds in seen.items():
            speed, p50, p99 = (
                statistics.median(one[key] for one in rounds) for key in ("tok_s", "ttft_p50", "ttft_p99")
            )
            cells = [str(connections), name, f"{speed:.0f}", f"{p50 * 1000:,.0f} / {p99 * 1000:,.0f}", "", ""]
            if name == "cairn":
                cells[4] = f"{verdict(faster, speed_goal)} (goal {speed_goal:g}x)"
                cells[5] = f"{verdict(sooner, first_goal, below=True)} (goal {first_goal:g}x)"
            rows.append(cells)
    return table(("connections", "server", "tok/s", "TTFT p50 / p99 ms", "tok/s ratio", "TTFT ratio"), rows)


def known(figures: Figures, part: str, key: str, server: str) -> list[float]:
    """Return the seconds of one server for one row of the second table, one per round."""
    return [one[key] for one in figures[part] if one["server"] == server and key in one]


def known_ratio(figures: Figures, part: str, key: str) -> float | None:
    """Return the median ratio of Cairn's time to llama-server's, or None if only one has the row."""
    ours, theirs = (known(figures, part, key, name) for name in NAMES)
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) if ours and theirs else None


def known_table(figures: Figures) -> str:
    """Return the table of median times to first token, in milliseconds."""
    rows = []
    for part, label in (("prefix", "2,000 tokens, "), ("context", "4,000 tokens, ")):
        keys = dict.fromkeys(key for one in figures[part] for key in one if key not in ("server", "ready again"))
        for key in keys:
            middles = [
                statistics.median(values) if (values := known(figures, part, key, name)) else None for name in NAMES
            ]
            ratio, cell = known_ratio(figures, part, key), ""
            if part == "prefix" and key != "new" and middles[0] is not None:
                reached = middles[0] <= PREFIX_GOAL
                cell = f"{'**reached**' if reached else 'missed'} ({PREFIX_GOAL * 1000:.0f} ms)"
            elif ratio is not None and (part, key) in KNOWN_GOALS:
                goal = KNOWN_GOALS[part, key]
                cell = f"{verdict(ratio, goal, below=True)} (goal {goal:g}x)"
            shown = ["" if one is None else f"{one * 1000:,.0f}" for one in middles]
            rows.append([label + key, *shown, "" if ratio is None else f"{ratio:.2f}x", cell])
    return table(("", *NAMES.values(), "ratio", "goal"), rows)


def beside_table(figures: Figures) -> str:
    """Return the table of a short prompt beside a long one: median seconds."""
    rows = []
    for key, label in (("short", "short, first token"), ("whole", "short, all 16"), ("long", "long, first token")):
        middles = [statistics.median(known(figures, "beside", key, name)) for name in NAMES]
        rows.append([label, *(f"{one:.1f}" for one in middles), f"{known_ratio(figures, 'beside', key):.2f}x"])
    return table(("", *NAMES.values(), "ratio"), rows)


BESIDE_GOAL, START_GOAL = 150e6, 1.5
"""A worker's bytes beyond weights and pool; seconds until a model is served again."""


def footprint_text(figures: Figures, heading: str = "## Start and memory") -> str:
    worker, again = figures["processes"]["worker"], statistics.median(figures["starts"])
    both = figures["weights"] + figures["pool"]
    beside, most = worker["own"] + worker["files"] - both, worker["peak"] - both
    others = ", ".join(f"{name} {value['own'] / 1e6:,.0f} MB" for name, value in figures["processes"].items())
    return "\n\n".join(
        (
            heading,
            f"`cairn serve` of {figures['file']}: ready after {figures['first_start']:.1f} s the first time, when the "
            f"weights are packed and kept. It is ready after {again:.2f} s from then on "
            f"(median of {len(figures['starts'])} starts, file in the page cache; "
            f"goal {START_GOAL:g} s: {'reached' if again <= START_GOAL else 'missed'}). "
            f"Processes that wanted a core before the run: {figures['machine']['load']:.1f}.",
            f"After prompts that filled the pool twice ({figures['tokens']:,} tokens), the worker held "
            f"{figures['weights'] / 1e6:,.0f} MB of packed weights, {figures['pool'] / 1e6:,.0f} MB of KV pool and "
            f"{beside / 1e6:,.0f} MB beside them, libraries included (goal {BESIDE_GOAL / 1e6:.0f} MB: "
            f"{'reached' if beside <= BESIDE_GOAL else 'missed'}). It held {most / 1e6:,.0f} MB at its peak, with KV "
            f"on its way to the disk. What the processes have for themselves: {others}.",
        )
    )


def overhead_text(figures: Figures) -> str:
    parts = ["## What serving itself costs"]
    parts.append(
        "`cairn serve` with an engine that computes (almost) nothing, over real HTTP, the client in a process of its "
        "own on the same cores; CPU as shares of one core. Goals: 1,500 requests/s and 15,000 tok/s at 4 connections. "
        "With 256 streams 15,000 tok/s at one event a token and 30,000 where tokens of a stream that lags are merged; "
        "plan and commit within 100 us at 32 rows."
    )
    rows = []
    for case in figures["cases"]:
        seconds = case["seconds"]
        shares = ", ".join(f"{case.get(part, 0.0) / seconds:.0%}" for part in ("front", "worker", "helper", "cpu"))
        cells = [case["name"], f"{case['requests'] / seconds:,.0f}", f"{case['tokens'] / seconds:,.0f}"]
        cells += [
            f"{case['events'] / case['tokens']:.2f}",
            f"{case['first_p50'] * 1000:.1f} / {case['first_p99'] * 1000:.1f}",
        ]
        rows.append([*cells, shares])
    head = ("case", "requests/s", "tok/s", "events a token", "TTFT p50 / p99 ms", "CPU: front, worker, helper, client")
    parts.append(table(head, rows))
    parts.append(f"Plan and commit at 32 decoding rows: {figures['scheduler'] * 1e6:.0f} us a step.")
    return "\n\n".join(parts)


DAY_HEAD = (
    "turns",
    "server",
    "seconds before + after the kill",
    "prompt tokens computed / new, before",
    "after the kill",
    "first token after the kill, s",
    "first token, median s",
    "same answers in both",
)


def day_sides(figures: Figures) -> dict[tuple[str, str], list[Figures]]:
    """Return the days of each mode and server, in the order of the modes and of Cairn and its peers."""
    days = {(day["mode"], name): list[Figures]() for day in figures["days"] for name in figures["answers"]}
    for day in figures["days"]:
        days[day["mode"], day["server"]].append(day)
    return days


def day_middle(days: Sequence[Figures], half: int, key: str) -> float | None:
    """Return the median of a figure of one half of the day, or None if the server did not report it."""
    values = [day["halves"][half][key] for day in days]
    return None if None in values else statistics.median(values)


def day_rows(figures: Figures) -> list[tuple[str, ...]]:
    """Return a table line per mode and server, with medians over its rounds."""
    rows = []
    for (mode, server), days in day_sides(figures).items():
        before, after = (day_middle(days, half, "seconds") for half in range(2))
        tokens = []
        for half in range(2):
            computed, new = (day_middle(days, half, key) for key in ("computed", "new"))
            tokens.append(f"{'not told' if computed is None else f'{computed:,.0f}'} / {new:,.0f}")
        killed = days[0]["killed"]
        first, middle = day_middle(days, 1, "first"), statistics.median(day["first_p50"] for day in days)
        same = figures["answers"][server]
        rows.append(
            (
                mode,
                server if killed else f"{server} (not killed)",
                f"{before:.0f} + {after:.0f}",
                *tokens,
                f"{first:.1f}" if killed else "",
                f"{middle:.2f}",
                f"{same['equal']} of {same['of']}" if same["days"] > 1 else "",
            )
        )
    return rows


def day_text(figures: Figures) -> str:
    about = (
        f"{figures['model']}, {figures['agents']} agents, {figures['turns']} turns each, instruction of "
        f"{figures['instruction']:,} characters, tool outputs of {figures['output'][0]:,} to {figures['output'][1]:,}, "
        f"answers of at most {figures['answer']} tokens; rounds: {figures['rounds']}. {figures['machine']['cpu']}, "
        f"{figures['machine']['threads']} threads; processes that wanted a core: {figures['machine']['load']:.1f} "
        f"before and {figures['load_after']:.1f} after the run."
    )
    heading, picture = "## A day of agents", f"![A day of agents, server by server]({DAY_CHART})"
    return "\n\n".join((heading, DAY_METHOD, about, table(DAY_HEAD, day_rows(figures)), picture))


# ---------------------------------------------------------------------------------------------------------- page


def page(folder: Path, by_hand: str) -> str:
    """Return the whole page from the figures in `folder`, with the part written by hand."""
    texts: dict[str, Callable[[Figures], str]] = {
        "cpu": cpu_text,
        "cpu-avx2": avx2_text,
        "http": http_text,
        "footprint": footprint_text,
        "http-avx2": partial(other_http_text, heading="## Over HTTP without AVX-512"),
        "footprint-avx2": partial(footprint_text, heading="## Start and memory without AVX-512"),
        "cpu-zen5": zen5_text,
        "http-zen5": partial(other_http_text, heading="## Over HTTP on Zen 5"),
        "footprint-zen5": partial(footprint_text, heading="## Start and memory on Zen 5"),
        "overhead": overhead_text,
        "agents-day": day_text,
    }
    parts = ["# Performance", METHOD]
    for name, text in texts.items():
        path = folder / f"{name}.json"
        if path.exists():
            parsed = json.loads(path.read_text())
            if name == "cpu":
                parts.append(machine_text(parsed))
            parts.append(text(parsed))
    paragraphs = "\n\n".join(parts).split("\n\n")
    wrapped = [
        paragraph if paragraph.startswith(("#", "|", "!")) else textwrap.fill(paragraph, 118)
        for paragraph in paragraphs
    ]
    return "\n\n".join(wrapped) + f"\n\n{MARK}\n{by_hand}"


def by_hand(path: Path) -> str:
    return path.read_text().partition(MARK + "\n")[2] if path.exists() else ""


def draw(figures: Figures, path: Path) -> None:
    """Draw the ratios of all rows as bars, and the goals as ticks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = figures["rows"][::-1]
    names = [f"{row['shape']} {row['kind']}: {row['name']}" for row in rows]
    figure, axes = pyplot.subplots(figsize=(9, 0.3 * len(rows) + 1.2), layout="constrained")
    colors = ["#2a7f62" if row["ratio"] >= row["goal"] else "#8fb8a8" for row in rows]
    axes.barh(names, [row["ratio"] for row in rows], color=colors)
    axes.plot([row["goal"] for row in rows], range(len(rows)), "k|", markersize=10, label="goal")
    axes.axvline(1, color="#b03030", linewidth=1, label="llama.cpp")
    axes.set_xlabel("tokens a second, Cairn / llama.cpp")
    axes.margins(y=0.01)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def draw_http(figures: Figures, path: Path) -> None:
    """Draw how many times faster Cairn's server is, as bars: tok/s and time to first token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows: list[tuple[str, float, float | None]] = []
    for connections, (speed, first) in GOALS.items():
        _, faster, sooner = load_ratios(figures["load"], connections)
        rows.append((f"{connections} at once: tok/s", faster, speed))
        rows.append((f"{connections} at once: first token", 1 / sooner, 1 / first))
    for part, label in (("prefix", "2,000 tokens, "), ("context", "4,000 tokens, ")):
        for key in dict.fromkeys(key for one in figures[part] for key in one if key not in ("server", "ready again")):
            if (ratio := known_ratio(figures, part, key)) is not None:
                goal = KNOWN_GOALS.get((part, key))
                rows.append((f"{label}{key}: first token", 1 / ratio, 1 / goal if goal else None))
    rows.reverse()
    figure, axes = pyplot.subplots(figsize=(9, 0.3 * len(rows) + 1.2), layout="constrained")
    colors = ["#2a7f62" if goal is None or ratio >= goal else "#8fb8a8" for _, ratio, goal in rows]
    axes.barh([name for name, _, _ in rows], [ratio for _, ratio, _ in rows], color=colors)
    goals = [(goal, place) for place, (_, _, goal) in enumerate(rows) if goal is not None]
    axes.plot([goal for goal, _ in goals], [place for _, place in goals], "k|", markersize=10, label="goal")
    axes.axvline(1, color="#b03030", linewidth=1, label="llama-server")
    axes.set_xscale("log")
    axes.set_xlabel("times as fast as llama-server, or as soon")
    axes.margins(y=0.01)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def draw_day(figures: Figures, path: Path) -> None:
    """Draw the seconds of both halves, and the tokens computed, with the new ones as ticks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sides = list(day_sides(figures).items())[::-1]
    names = [f"{server}\n{mode}" for (mode, server), _ in sides]
    figure, both = pyplot.subplots(1, 2, figsize=(11, 0.7 * len(sides) + 1.4), layout="constrained", sharey=True)
    whats = (("seconds", "seconds of all turns"), ("computed", "prompt tokens computed"))
    for axes, (key, label) in zip(both, whats, strict=True):
        halves = [[day_middle(days, half, key) for half in range(2)] for _, days in sides]
        # A server that does not report computed tokens has no bar.
        results = [(half[0] or 0.0, half[1] or 0.0) if None not in half else (0.0, 0.0) for half in halves]
        first, second = ([result[half] for result in results] for half in range(2))
        axes.barh(names, first, color="#2a7f62", label="before the kill")
        axes.barh(names, second, left=first, color="#8fb8a8", label="after it")
        axes.set_xlabel(label)
    new = [sum(day_middle(days, half, "new") or 0.0 for half in range(2)) for _, days in sides]
    both[1].plot(new, range(len(sides)), "k|", markersize=24, label="new ones")
    figure.legend(*both[1].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if the page is not what the figures make")
    args = parser.parse_args()
    path, folder = DOCS / "performance.md", DOCS / "performance"
    made = page(folder, by_hand(path))
    if args.check:
        sys.exit(0 if path.read_text() == made else "docs/performance.md: run python benchmarks/report.py")
    path.write_text(made)
    if (folder / "cpu.json").exists():
        draw(json.loads((folder / "cpu.json").read_text()), DOCS / CHART)
    if (folder / "http.json").exists():
        draw_http(json.loads((folder / "http.json").read_text()), DOCS / HTTP_CHART)
    if (folder / "agents-day.json").exists():
        draw_day(json.loads((folder / "agents-day.json").read_text()), DOCS / DAY_CHART)


if __name__ == "__main__":
    main()
