"""Three agents remember, although their server is killed.

    python examples/remember.py

Each agent is told about 1,500 tokens; the server is killed with all its processes (kill -9) and started again. Then
each agent computes only what is new, and says what it would have said without the kill, token for token. At the end
one agent is forked, one rolled back, and one moved to a second server as a file. It takes a minute or two, needs no
network, and leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

AGENTS = {"ada": ("Zorvak", "Kelmora"), "bob": ("Mirelle", "Vintra"), "eve": ("Tobin", "Oslund")}
QUESTION = "What is my name?"
CONTEXT_TOKENS = 1500
CHUNK = 64
GREEDY = {"temperature": 0, "max_tokens": 24}


class Server:
    """A `cairn serve` of our own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=600, trust_env=False)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it is ready."""
        folders = ["--kv-dir", str(self._folder / "kv"), "--agents-dir", str(self._folder / "agents")]
        command = [sys.executable, "-c", "from cairn.cli import main; main()", "serve", "demo"]
        command += ["--port", str(self._port), "--kv-load", "always", "--kv-gb", "0.3", *folders]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
        while self._process.poll() is None:
            try:
                if self._http.get("/health/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise SystemExit(f"the server ended with exit code {self._process.returncode}")

    def kill(self) -> None:
        """kill -9, all its processes at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def get(self, path: str) -> Any:
        """GET, parsed."""
        return self._answer(self._http.get(path)).json()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """POST JSON, parsed."""
        return self._answer(self._http.post(path, json=body)).json()

    def file(self, id: str) -> bytes:
        """Return an agent as a file."""
        return self._answer(self._http.get(f"/v1/agents/{id}/export")).content

    def take(self, id: str, file: bytes) -> Any:
        """Make an agent of a file."""
        octets = {"content-type": "application/octet-stream"}
        return self._answer(self._http.post(f"/v1/agents/import?id={id}", content=file, headers=octets)).json()

    def _answer(self, response: httpx.Response) -> httpx.Response:
        if response.is_error:
            raise SystemExit(f"{response.request.url}: {response.text}")
        return response


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Run a server on a folder and kill it at the end."""
    server = Server(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def story(server: Server, id: str) -> str:
    """About 1,500 tokens."""
    text = f"The house book of {id}:\n"
    day = 0
    while server.post("/tokenize", {"prompt": text})["count"] < CONTEXT_TOKENS - 60:
        lines = (
            f"Day {day + n}: {id} swept the yard, fed {(day + n) % 7 + 2} hens and mended a gate." for n in range(4)
        )
        text += "\n".join(lines) + "\n"
        day += 4
    return text


def tell(server: Server) -> None:
    """Make the agents and tell each something."""
    for id, (name, place) in AGENTS.items():
        server.post("/v1/agents", {"id": id, "system": story(server, id)})
        turn(server, id, f"Hi, I am {name} and I live in {place}.")


def turn(server: Server, id: str, text: str) -> Any:
    """One turn; the answer's body."""
    return server.post(f"/v1/agents/{id}/turns", {"messages": [{"role": "user", "content": text}], **GREEDY})


def said(answer: Any) -> str:
    """Return the text of an answer."""
    return str(answer["choices"][0]["message"]["content"])


def main() -> None:
    """Tell, kill, ask, compare."""
    with tempfile.TemporaryDirectory(prefix="cairn-remember-") as name:
        folder = Path(name)
        with serving(folder / "undisturbed") as server:
            tell(server)
            expected = {id: said(turn(server, id, QUESTION)) for id in AGENTS}
        with serving(folder / "killed") as server:
            tell(server)
            before = {id: server.get(f"/v1/agents/{id}")["tokens"] for id in AGENTS}
            server.post("/v1/cache/flush", {})
            server.kill()
            print("The server was killed. It starts again.")
            server.start()
            for id in AGENTS:
                answer = turn(server, id, QUESTION)
                check(id, answer, before[id], expected[id])
            branches(server, expected)
            with serving(folder / "second") as second:
                second.take("moved", server.file("bob"))
                both = [said(turn(one, id, "Where do I live?")) for one, id in ((server, "bob"), (second, "moved"))]
                require(both[0] == both[1], f"the moved agent says {both[1]!r}, not {both[0]!r}")
                print(f"bob moved to a second server and says the same: {both[1]}")


def check(id: str, answer: Any, before: int, expected: str) -> None:
    """Print what an agent said after the kill, and how little it computed for it."""
    usage = answer["usage"]
    report = usage["cairn"]
    new = usage["prompt_tokens"] - before
    print(
        f"{id}: {said(answer)}   ({usage['prompt_tokens']} tokens in the prompt, {report['disk']} from disk, "
        f"{report['computed']} computed, {new} of them new)"
    )
    require(said(answer) == expected, f"{id} says {said(answer)!r}; undisturbed it was {expected!r}")
    require(report["disk"] > 0, f"{id} found nothing on disk")
    require(report["computed"] < new + CHUNK, f"{id} computed {report['computed']} tokens, of which {new} were new")


def branches(server: Server, expected: dict[str, str]) -> None:
    """Fork one agent at turn 2 and roll another back."""
    fork = server.post("/v1/agents/ada/fork", {"turn": 2, "id": "ada-too"})
    one, other = (said(turn(server, id, "What is Cairn?")) for id in ("ada", fork["id"]))
    require(one == other, "the fork does not say what the original says")
    server.post("/v1/agents/eve/rollback", {"turn": 1})
    again = said(turn(server, "eve", QUESTION))
    require(again == expected["eve"], "after the rollback eve says something else")
    print("ada was forked at turn 2, eve rolled back to turn 1; both go on as they should.")


def require(fact: bool, otherwise: str) -> None:
    """Leave with a sentence where something is not so."""
    if not fact:
        raise SystemExit(f"NOT AS PROMISED: {otherwise}")


if __name__ == "__main__":
    main()
