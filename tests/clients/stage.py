"""A stage for real clients: a scripted model, its server as a process, and a proxy in front of it.

The script is a list of answers. The number of tool results in the conversation selects one, so an agent that calls a
tool a turn is led through all of them; a request without tools gets another answer, always the same. The proxy records
the server's cache figures, and may kill the server between two answers.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from cairn.text.tokens.detokenizer import _BYTES
from tests.api.process import Served
from tests.scripted_model import write_scripted

PARTS = """\
{%- set results = namespace(n=0) %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' ~ (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nCall with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set part = [results.n, LAST] | min %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<|answer_' ~ (part if tools else ALONE) ~ '|>' ~ message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- set results.n = results.n + 1 %}
        {{- '<|im_start|>user\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<|answer_' ~ ([results.n, LAST] | min if tools else ALONE) ~ '|>' }}
{%- endif %}
"""
PAGES = Path(__file__).parents[2] / "docs"
NODE = Path(__file__).parents[2] / ".venv/npm/node_modules"
SAID = "It is 7 degrees in Oslo."
FACTS = {"city": "Oslo", "degrees": 7}


def calling(name: str, arguments: dict[str, Any]) -> list[str]:
    """Return an answer that calls a tool."""
    call = json.dumps({"name": name, "arguments": arguments})
    return ["<tool_call>", f"\n{call}\n", "</tool_call>"]


def write_part(
    path: Path,
    answers: Sequence[Sequence[str]],
    alone: Sequence[str],
    *,
    natural: bool = False,
    context: int = 65_536,
) -> Path:
    """Write a model that gives these answers, and `alone` where there are no tools.

    Its tokenizer has whole words, since agents' prompts are long.

    Answers are single tokens, which no grammar forces; with `natural` they are tokenized as usual.
    """
    learnt = learn()
    merges = [tuple(pair) for pair in json.loads(learnt.to_str())["model"]["merges"]]
    template = PARTS.replace("LAST", str(len(answers) - 1)).replace("ALONE", str(len(answers)))
    tags = dict.fromkeys(("<tool_call>", "</tool_call>"), 4)
    both: Sequence[Sequence[str | bytes]] = [*answers, alone]
    if natural:
        both = [[part for piece in one for part in ([piece] if piece in tags else cut(learnt, piece))] for one in both]
    return write_scripted(path, [], template=template, kinds=tags, context=context, answers=both, merges=merges)


def learn() -> Tokenizer:
    """Train a tokenizer on English text."""
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=4096, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    learnt.train([str(page) for page in sorted(PAGES.glob("*.md"))], trainer)
    return learnt


def cut(learnt: Tokenizer, text: str) -> list[bytes]:
    """Split a text into the tokens that encode it."""
    return [bytes(_BYTES[char] for char in token) for token in learnt.encode(text).tokens]


class Prompter:
    """A proxy in front of a server process, which may be replaced; it records the answers."""

    def __init__(self, start: Callable[[], Served], kill_before: int = -1) -> None:
        """Start a server, which is killed and replaced before the generating answer number `kill_before`."""
        self.server = start()
        self.server.wait_ready()
        self.asked: list[dict[str, Any]] = []
        """Bodies of generating requests with tools."""
        self.answered: list[str] = []
        """Answers to these."""
        self.others: list[str] = []
        """Other requests: method, path and status."""
        self.killed = 0
        self._start, self._kill_before = start, kill_before
        self._lock = threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def _pass(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                outer._pass(self, body)

            do_GET = do_POST = do_HEAD = do_DELETE = _pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        self.server.end()

    def cached(self) -> list[tuple[int, int]]:
        """Return (prompt tokens, cached tokens) of each answer."""
        return [usage_of(text) for text in self.answered]

    def _pass(self, handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
        asked = json.loads(body) if body.startswith(b"{") else {}
        counts = handler.command == "POST" and bool(asked.get("tools")) and "count_tokens" not in handler.path
        with self._lock:
            if counts and len(self.asked) == self._kill_before and not self.killed:
                self.server.process.kill()
                self.server.end()
                self.server = self._start()
                self.server.wait_ready()
                self.killed += 1
            if counts:
                self.asked.append(asked)
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        try:
            self._forward(handler, body, connection, counts=counts)
        except (ConnectionError, http.client.HTTPException):
            handler.close_connection = True  # one of the two has closed
        finally:
            connection.close()

    def _forward(
        self,
        handler: http.server.BaseHTTPRequestHandler,
        body: bytes,
        connection: http.client.HTTPConnection,
        *,
        counts: bool,
    ) -> None:
        headers = {name: value for name, value in handler.headers.items() if name.lower() != "host"}
        connection.request(handler.command, handler.path, body or None, headers)
        answer = connection.getresponse()
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                handler.send_header(name, value)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        pieces = []
        while piece := answer.read1(65536):
            pieces.append(piece)
            handler.wfile.write(piece)
            handler.wfile.flush()
        text = b"".join(pieces).decode("utf-8", "replace")
        if counts:
            self.answered.append(text)
        if not counts or answer.status != 200:
            self.others.append(f"{handler.command} {handler.path} {answer.status} {text[:300]}")


def usage_of(text: str) -> tuple[int, int]:
    """Return the usage of an answer in any dialect: prompt tokens and cached ones."""

    def largest(name: str) -> int:
        return max((int(number) for number in re.findall(rf'"{name}":\s*(\d+)', text)), default=0)

    if '"cache_read_input_tokens"' in text:  # Anthropic's counts do not overlap
        parts = [largest(f"{name}input_tokens") for name in ("cache_read_", "cache_creation_", "")]
        return sum(parts), parts[0]
    return max(largest("prompt_tokens"), largest("input_tokens")), largest("cached_tokens")


@contextlib.contextmanager
def stage(
    tmp_path: Path,
    answers: Sequence[Sequence[str]],
    alone: Sequence[str] = ("Hello.",),
    *,
    kill_before: int = -1,
    natural: bool = False,
    **options: Any,
) -> Iterator[Prompter]:
    """Yield a server whose model gives these answers, behind a `Prompter`."""
    path = write_part(tmp_path / "part.gguf", answers, alone, natural=natural)
    settings = {"engine": "cpu", "kv_gb": 1.0, "served_name": "part", "agents_dir": str(tmp_path / "agents")}
    settings |= {"kv_dir": str(tmp_path / "kv"), "request_timeout": 60.0}
    prompter = Prompter(lambda: Served(**(settings | {"model": str(path)} | options)), kill_before)
    try:
        yield prompter
    finally:
        prompter.close()


def found(program: str) -> str | None:
    """Return the path of an agent's program, on PATH or among this project's npm packages."""
    return shutil.which(program) or shutil.which(program, path=str(NODE / ".bin"))


def run_script(script: str, *arguments: str) -> str:
    """Return what a node.js module prints, with this project's packages."""
    node = shutil.which("node")
    assert node is not None
    file = NODE / f".cairn-test-{os.getpid()}.mjs"
    file.write_text(script)
    try:
        done = subprocess.run([node, str(file), *arguments], capture_output=True, text=True, timeout=60, check=False)
    finally:
        file.unlink()
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def environment(program: str, home: Path, **more: str) -> dict[str, str]:
    """Return an agent's environment: a home of its own, and nothing of the user's."""
    kept = {key: os.environ[key] for key in ("PATH", "LANG", "TERM") if key in os.environ}
    kept["PATH"] = f"{Path(program).parent}:{kept.get('PATH', '')}"
    return kept | {"HOME": str(home), "NO_COLOR": "1", "CI": "1"} | more
