"""Malformed input: a typed 4xx, never a 500, and the server goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import random
import re
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.api.process import Served, served
from tests.api.sockets import answer, events, request_bytes

Figure = Callable[[str, str], None]

CANARY = {"model": "demo", "prompt": "a canary", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
        {"role": "user", "content": "hi"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "max_tokens": 3,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": 1},
    "seed": 3,
    "stop": ["x"],
    "stop_token_ids": [9],
    "min_tokens": 1,
    "ignore_eos": False,
    "n": 1,
    "logprobs": True,
    "top_logprobs": 2,
    "stream": False,
    "user": "u",
    "chat_template_kwargs": {"a": 1},
}  # fmt: skip
TEXT: dict[str, Any] = {
    "model": "demo",
    "prompt": "hi",
    "max_tokens": 3,
    "echo": True,
    "logprobs": 2,
    "n": 2,
    "stop": "x",
    "stream": True,
    "stream_options": {"include_usage": True},
    "suffix": None,
    "best_of": 1,
    "temperature": 1,
}
ANSWER: dict[str, Any] = {
    "type": "object",
    "title": "t",
    "properties": {
        "steps": {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 9}, "minItems": 1},
        "risk": {"enum": ["low", ["high"], {"a": 1}], "default": "low"},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "kind": {"const": [1, {"b": None}]},
    },
    "required": ["steps", "risk", "count"],
    "additionalProperties": False,
}
WORKFLOW: dict[str, Any] = {
    "workflow": {
        "name": "n",
        "system": "s",
        "roles": {"planner": "p"},
        "inputs": {"task": None, "items": [1, {"a": [2]}]},
        "nodes": [
            {"id": "plan", "role": "planner", "prompt": "{{ inputs.task }}", "output": ANSWER, "retries": 1},
            {
                "id": "code",
                "prompt": "{{ item }} {{ index }} {{ plan.steps.0 or inputs.task }}",
                "each": {"in": "plan.steps", "limit": 3},
                "takes": {"plan.steps": "array"},
                "when": {
                    "any": [{"output": "plan.risk", "in": ["low", ["high"]]}, {"output": "plan.count", "above": 3}]
                },
                "needs": ["plan"],
                "sampling": {"max_tokens": 3, "stop": ["x"]},
            },
            {
                "id": "again",
                "loop": {
                    "limit": 2,
                    "until": {"all": [{"output": "fix", "is": "done"}, {"output": "plan.risk", "is_not": {"a": 1}}]},
                    "nodes": [
                        {
                            "id": "fix",
                            "prompt": "{{ previous.fix or code }}",
                            "when": {"output": "code", "exists": True},
                        }
                    ],
                },
            },
        ],
        "merge": {"precedence": ["plan"]},
        "at_once": 2,
    }
}
RESPONSE: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        {"role": "user", "content": "hi"},
    ],
    "instructions": "s",
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}},
        {
            "type": "custom",
            "name": "g",
            "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a" b*\nb: /c/'},
        },
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h"}]},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 3,
    "store": False,
    "metadata": {"a": "b"},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": ["string", "null"], "minLength": 1, "maxLength": 9, "pattern": "^[a-z]*$", "format": "date"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": 3},
        "l": {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 1, "maxItems": 2},
        "o": {"anyOf": [{"const": True}, {"$ref": "#/$defs/d"}]},
    },
    "required": ["a", "n"],
    "additionalProperties": False,
    "$defs": {"d": {"type": "boolean"}},
}
HELD: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 3,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
}
STRICT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 3,
    "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}],
    "tool_choice": "required",
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", HELD),
    ("/v1/chat/completions", STRICT),
    ("/v1/completions", TEXT),
    ("/tokenize", {"model": "demo", "prompt": "hi"}),
    ("/tokenize", {"messages": CHAT["messages"], "tools": [TOOL]}),
    ("/detokenize", {"model": "demo", "tokens": [5, 6, 7]}),
    ("/v1/workflows/check", WORKFLOW),
    ("/v1/responses", RESPONSE),
]
ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    1.5,
    -0.0,
    1e308,
    5e-324,
    10**18,
    10**19,
    10**30,
    2**63,
    -(2**63),
    2**64,
    "",
    "x",
    "0",
    "a\n",
    "1" * 5000,
    "{{" * 500,
    "\x00",
    "<|im_start|>system\n",
    "\u202e\ud7ff\ufffe",
    "\N{GRINNING FACE}" * 50,
    "x" * 5000,
    [],
    {},
    [[]],
    [None],
    [0],
    [-1],
    [10**12],
    ["a", 1],
    [{}],
    {"": 0},
    {"type": "text"},
    {"type": "function"},
    [[[[[[]]]]]],
    {"a": {"b": {"c": [1, 2, {"d": None}]}}},
]
TEXTS: list[bytes] = [
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"01", b"+1", b".5", b"1.", b"0x1", b"'a'", b"tru", b"nul",
    b'"\\ud800"', b'"\\x"', b'"\xff"', b'"\x01"', b'{"a":1,"a":1}', b"[1,]", b'{"a":1,}', b"//", b"[" * 70 + b"]" * 70,
    b"9" * 5000, b"-" + b"9" * 400, b"1e-400", b'"' + b"\\u0000" * 20 + b'"',
]  # fmt: skip


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Yield every place in a JSON value."""
    results = [at]
    if isinstance(value, dict):
        for key, item in value.items():
            results += paths(item, (*at, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            results += paths(item, (*at, index))
    return results


def replaced(value: Any, at: tuple[Any, ...], new: Callable[[Any], Any]) -> Any:
    if not at:
        return new(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


def odd_body(rng: random.Random) -> tuple[str, bytes]:
    """Return a body that is nearly right."""
    path, body = rng.choice(BODIES)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.choice(paths(body)[1:] or [()])
        kind = rng.randrange(5)
        if kind == 0 and at and isinstance(at[-1], str):
            body = replaced(body, at[:-1], lambda value: {k: v for k, v in value.items() if k != at[-1]})  # noqa: B023
        elif kind == 1:
            name = rng.choice(["extra", "Model", "", "response_format", "suffix", "__proto__", "n" * 100, "functions"])
            spot = rng.choice([p for p in paths(body) if isinstance(_get(body, p), dict)])
            odd = rng.choice(ODD)
            body = replaced(body, spot, lambda value: {**value, name: odd})  # noqa: B023
        else:
            odd = rng.choice(ODD)
            body = replaced(body, at, lambda value: odd)  # noqa: B023
        if not isinstance(body, dict) or len(paths(body)) < 2:
            break
    data = json.dumps(body).encode()
    if rng.random() < 0.3:
        spot = rng.choice([i for i, byte in enumerate(data) if byte in b':,[{"'] or [0])
        data = data[: spot + 1] + rng.choice(TEXTS) + data[spot + 1 + rng.randrange(3) :]
    return path, data


def _get(value: Any, at: tuple[Any, ...]) -> Any:
    for key in at:
        value = value[key]
    return value


def odd_bytes(rng: random.Random) -> bytes:
    """Return a raw request that is nearly right."""
    path, body = rng.choice(BODIES)
    data = bytearray(request_bytes("POST", path, json.dumps(body).encode()))
    if rng.random() < 0.3:
        chunk = json.dumps(body).encode()
        head = request_bytes("POST", path, b"", "Content-Type: application/json", "Transfer-Encoding: chunked")
        data = bytearray(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(chunk), chunk))
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        spot = rng.randrange(min(len(data), 250) if rng.random() < 0.7 else len(data))
        match rng.randrange(6):
            case 0:
                data[spot] = rng.randrange(256)
            case 1:
                del data[spot : spot + rng.choice((1, 2, 10, 100))]
            case 2:
                data[spot:spot] = rng.randbytes(rng.choice((1, 2, 20)))
            case 3:
                data[spot:spot] = data[spot : spot + rng.choice((1, 20, 200))]
            case 4:
                data[spot:spot] = rng.choice((b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"HTTP/1.1", b"Host: evil\r\n"))
            case 5:
                del data[spot:]
        if not data:
            data = bytearray(b"\r\n")
    return bytes(data)


def check_error(status: int, body: bytes, sent: Any) -> None:
    assert 400 <= status < 500, (status, body[:300], sent)
    error = json.loads(body)["error"]
    figures = {"n_prompt_tokens", "n_ctx"} if error["code"] == "context_length_exceeded" else set()
    fields = set(error)
    assert {"message", "type", "param", "code"} <= fields <= {"message", "type", "param", "code"} | figures, sent
    assert error["message"] and error["code"], sent
    assert len(error["message"]) < 1000, sent


def odd_host(rng: random.Random) -> str:
    """Return a Host that may look like one of this machine's names."""
    name = rng.choice(["localhost", "127.0.0.1", "[::1]", "[localhost]", "[127.0.0.1]", "[]", "evil.com", "LOCALHOST"])
    before = rng.choice(["", "", "", "evil.com.", "evil.com@", "[", "evil.com:80,", "\u00ed", "localhost "])
    behind = rng.choice(["", "", "", "evil.com", ".evil.com", "]", "[", "@evil.com", "%00", "/", "#", ".", ",evil.com"])
    return before + name + behind + rng.choice(["", "", ":80", ":", ":65535", ":evil", ":80:80", ":123456", ": 80"])


FILE = b"a fact. " * 2_000
QUOTA_MIB = 4


def form(parts: list[tuple[str, str | None, bytes]]) -> bytes:
    """Return a multipart body from each part's name, file name and content."""
    body = b""
    for name, filename, data in parts:
        disposition = f'name="{name}"' + ("" if filename is None else f'; filename="{filename}"')
        body += f"--edge\r\nContent-Disposition: form-data; {disposition}\r\n\r\n".encode() + data + b"\r\n"
    return body + b"--edge--\r\n"


def odd_form(rng: random.Random) -> bytes:
    """Return an upload that is nearly right: wrong are its parts, bytes, length or sender."""
    parts: list[tuple[str, str | None, bytes]] = [("purpose", None, b"user_data"), ("file", "a.txt", FILE)]
    kind = rng.randrange(6)
    if kind == 0:
        parts = rng.choices(parts, k=rng.choice((0, 1, 3, 70)))
    elif kind == 1:
        name = rng.choice(("purpose", "file", "", "x" * 5000, "\N{GRINNING FACE}", 'a"; filename="b', "id"))
        parts.append((name, rng.choice((None, "b.txt", "../b", "")), rng.choice((b"", b"\xff", b"x" * 70_000))))
    body = bytearray(form(parts))
    for _ in range(rng.choice((0, 1, 3)) if kind < 3 else 0):
        spot = rng.randrange(min(len(body) + 1, 300))  # nothing may be left of a short one
        body[spot : spot + rng.choice((0, 1, 30))] = rng.randbytes(rng.choice((0, 1, 20)))
    if kind == 3:
        del body[rng.randrange(len(body)) :]
    length = len(body) + (rng.choice((0, -40, 40, 5_000_000)) if kind == 4 else 0)
    path = rng.choice(("/v1/files", "/v1/files", "/v1/collections/c/documents", "http://localhost/v1/files"))
    boundary = rng.choice(("edge", "edge", "edge", '"edge"', "", "x" * 100, "ed\x01ge"))
    head = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: multipart/form-data; boundary={boundary}"]
    head.append(f"X-Cairn-Agent: {rng.choice(('a', 'a b', 'x' * 500, chr(0xFF)))}{rng.randrange(9)}")
    if kind != 5:
        head.append(f"Content-Length: {length}")
        return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + bytes(body)
    sent = "\r\n".join([*head, "Transfer-Encoding: chunked"]).encode("latin-1") + b"\r\n\r\n"
    for at in range(0, len(body), step := rng.choice((1_000, 9_999, len(body) or 1))):
        piece = bytes(body[at : at + step])
        sent += b"%x\r\n%s\r\n" % (len(piece), piece)
    return sent + rng.choice((b"0\r\n\r\n", b"0\r\n\r\n", b"", b"zz\r\n"))


def is_ours(host: str) -> bool:
    """Return whether a host means this machine: names below `localhost` belong to nobody else."""
    return (
        re.fullmatch(r"(([^@:/,\[\]]+\.)?localhost|127\.0\.0\.1|\[::1\])(:[0-9]{0,5})?", host, re.IGNORECASE)
        is not None
    )


async def exchange(port: int, data: bytes, *, over: bool = False) -> bytes:
    """Return all that the server answers to these bytes; with `over`, the client closes its side right behind them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if over:
            writer.write_eof()
        received = b""
        async with asyncio.timeout(60):
            while not complete(received):
                try:
                    piece = await asyncio.wait_for(reader.read(1 << 16), 0.2 if received else 0.5)
                except TimeoutError:
                    if writer.transport.is_closing() or not writer.can_write_eof():
                        break
                    writer.write_eof()  # the server waits for more, which never comes
                    piece = await reader.read(1 << 16)
                if not piece:
                    break
                received += piece
        return received
    except ConnectionError:
        return b""
    finally:
        writer.close()


def complete(received: bytes) -> bool:
    head, separator, rest = received.partition(b"\r\n\r\n")
    if not separator or b" 100 " in head[:13]:
        return False
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length: "):
            return len(rest) >= int(line[16:])
    return rest.endswith(b"0\r\n\r\n")


async def attacks(count: int, each: Callable[[int], Any]) -> None:
    numbers: AsyncIterator[int] | Any = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await each(number)

    await asyncio.gather(*(work() for _ in range(32)))


@pytest.fixture(scope="module")
def server() -> Any:
    with served(context=256, max_queue=2000, max_running=128, body_timeout=3.0, header_timeout=3.0) as process:
        yield process


def canary(server: Served) -> Any:
    return server.post("/v1/completions", CANARY)["choices"]


def all_processes(server: Served) -> set[int]:
    """Return the server's processes with the one that compiles grammars, which starts with the first grammar."""
    server.post("/v1/completions", {"prompt": "hi", "max_tokens": 2, "guided_regex": "a"})
    return server.family()


async def test_the_bodies_are_right_before_they_are_changed(server: Served) -> None:
    for path, body in BODIES:
        data = request_bytes("POST", path, json.dumps(body).encode())
        for over in (False, True):  # the second as nc -N does
            result = await exchange(server.port, data, over=over)
            assert result.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").startswith(b"HTTP/1.1 200"), result


LARGE = "9" * 5000
GRAMMARS: list[dict[str, Any]] = [
    *(
        {"guided_json": schema}
        for schema in (
            {"multipleOf": 10**6},
            {"type": "number", "multipleOf": 0},
            {"type": "number", "multipleOf": -1},
            {"multipleOf": 1e-320},
            {"multipleOf": 123456.789},
            {"multipleOf": LARGE},
            {"minLength": 2**63},
            {"type": "string", "minLength": 10**18, "maxLength": 10**19},
            {"type": "integer", "minimum": 1e308, "maximum": -1e308},
            {"type": "array", "minItems": 10**9},
            {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
            {"$ref": "#"},
            {"$ref": "#/" + "a/" * 5000},
            {"$ref": "file:///etc/passwd"},
            {"enum": []},
            {"enum": [[[]]] * 4000},
            {"type": []},
            {"type": "nothing"},
            {"properties": {str(n): {} for n in range(401)}},
            {"properties": []},
            {"required": [[]]},
            {"pattern": "("},
            {"pattern": "(" * 20_000},
            {"type": "string", "pattern": "^((((a{1,400}){1,400}){1,400}){1,400})$"},
            {"type": "string", "pattern": "\\p{L}" * 500},
            {"allOf": [{"pattern": f"a{{{n},{n + 900}}}b", "type": "string"} for n in range(60)]},
            {"x-guidance": {"whitespace_pattern": "("}},
            {"x-guidance": LARGE},
        )
    ),
    *(
        {"guided_regex": text}
        for text in ("", "(", "a{1000000}", "(?=a)", "\\", "[" * 5000, "\x00", "(a*)*" * 500, "\\p{Nothing}")
    ),
    *(
        {"guided_grammar": text}
        for text in (
            "start: start",
            "start: a",
            "start: %json {",
            'start: %json {"multipleOf": 1000003}',
            "%json " * 5000,
            "start: <[1]>",
            "start: <|im_end|>",
            "root ::= " + "(" * 20_000,
            "start: s\ns: " + " | ".join("s " * n for n in range(2, 40)) + ' | "a"',
            "\x00",
            'start: "a"' + ' | "a"' * 20_000,
        )
    ),
    {"guided_choice": ["a"] * 5000},
    {"guided_choice": ["x" * 300_000]},
    {"grammar": "root ::= [" + "a" * 50_000},
    {"structured_outputs": {"regex": "a", "json": {}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": LARGE}}},
    {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"multipleOf": 10**6}}}]},
]
"""Grammars and schemas that are costly or wrong."""


async def test_odd_grammars_are_typed_4xx_or_followed(server: Served, figure: Figure) -> None:
    """None is a 500, none ends a process, and each ends soon."""
    truth, family = canary(server), server.family()
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    first = await exchange(
        server.port, request_bytes("POST", "/v1/chat/completions", json.dumps({**body, "guided_regex": "a"}).encode())
    )
    assert first.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").startswith(b"HTTP/1.1 200"), first
    family |= server.family()  # the compiling process runs now
    refused = 0
    for more in GRAMMARS:
        data = json.dumps({**body, **more}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request_bytes("POST", "/v1/chat/completions", data))
        status, _, said = await asyncio.wait_for(answer(reader), 120)
        writer.close()
        refused += status != 200
        if status != 200:
            check_error(status, said, str(more)[:200])
    assert server.family() == family
    assert canary(server) == truth
    assert refused > len(GRAMMARS) // 2
    figure("odd grammars", f"{len(GRAMMARS)}: {refused} typed 4xx, the rest followed; same processes, canary exact")


async def test_odd_json_is_a_typed_4xx(server: Served, figure: Figure, prove: bool) -> None:
    """Known failures 10, 50: nothing that is nearly a request becomes a 500 or kills the worker."""
    count = 10_000 if prove else 1_000
    truth, family = canary(server), all_processes(server)
    refused = 0

    async def each(number: int) -> None:
        nonlocal refused
        path, data = odd_body(random.Random(number))
        result = await exchange(server.port, request_bytes("POST", path, data))
        head, _, body = result.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
        assert head, (number, data)
        status = int(head.split()[1])
        if status == 200:
            if b"event-stream" in head:
                text = b"".join(
                    piece for piece in body.split(b"\r\n") if piece.startswith((b"data", b": ")) or piece == b"\n"
                )
                assert events(text)[-1] == "[DONE]", (number, data)
            else:
                json.loads(body)
            return
        refused += 1
        check_error(status, body, (number, data))

    await attacks(count, each)
    assert refused > count // 2
    assert server.family() == family
    assert canary(server) == truth
    figure("malformed JSON", f"{count}: {refused} typed 4xx, the rest valid; no 5xx, same processes, canary exact")


async def test_odd_hosts_are_refused(server: Served, figure: Figure, prove: bool) -> None:
    """DNS rebinding: a page may call under a host name of its own; however it is written, it is not this machine."""
    hosts = sorted({odd_host(random.Random(number)) for number in range(5_000 if prove else 500)})
    served = 0

    async def each(number: int) -> None:
        nonlocal served
        host = hosts[number]
        head = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n"
        if number % 2 and re.fullmatch(r"[!-~]+", host):  # the same in the request line
            head = f"GET http://{host}/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
        result = await exchange(server.port, head.encode("latin-1"))
        status = int(result.split()[1])
        assert (status == 200) is is_ours(host) and (status == 200 or 400 <= status < 500), (host, result[:300])
        served += status == 200

    await attacks(len(hosts), each)
    assert 0 < served < len(hosts) // 4
    figure("odd hosts", f"{len(hosts)}: {served} ways to write this machine's, all others refused")


async def test_odd_uploads_are_a_typed_4xx_and_hold_no_room(figure: Figure, prove: bool) -> None:
    """Whatever becomes of them, none of their bytes count against a quota afterwards."""
    count, kept, refused = 3_000 if prove else 300, 0, 0
    with served(context=256, max_disk_mib=QUOTA_MIB, body_timeout=3.0, header_timeout=3.0) as server:
        family = server.family()
        for whole in (False, True):
            data = form([("purpose", None, b"user_data"), ("file", "a.txt", FILE)])
            length = f"Content-Length: {len(data) - (0 if whole else 9)}"
            head = request_bytes("POST", "/v1/files", b"", "Content-Type: multipart/form-data; boundary=edge", length)
            assert (await exchange(server.port, head + data)).startswith(b"HTTP/1.1 200") is whole

        async def each(number: int) -> None:
            nonlocal kept, refused
            sent, status = odd_form(random.Random(number)), 429
            while status == 429:  # one client may upload eight at once
                result = await exchange(server.port, sent)
                head, _, body = result.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
                if not head:
                    return  # closed, as the announced bytes did not come
                status = int(head.split()[1])
                await asyncio.sleep(0.02 * (status == 429))
            kept += status == 200
            if status != 200:
                refused += 1
                check_error(status, body, (number, sent[:500]))

        await attacks(count, each)
        assert kept and refused > count * 3 // 4
        with urllib.request.urlopen(server.url + "/v1/files?limit=1000") as answer:
            files = [item["id"] for item in json.load(answer)["data"]]
        assert len(files) == kept + 1
        for id in files:
            urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/files/{id}", method="DELETE")).close()
        # The whole quota is free again
        for size, status in (((QUOTA_MIB << 20), b"HTTP/1.1 200"), (1, b"HTTP/1.1 403")):
            data = form([("purpose", None, b"user_data"), ("file", "a.txt", bytes(size))])
            head = request_bytes(
                "POST",
                "/v1/files",
                b"",
                "Content-Type: multipart/form-data; boundary=edge",
                f"Content-Length: {len(data)}",
            )
            assert (await exchange(server.port, head + data)).startswith(status)
        assert server.family() == family
    figure("malformed uploads", f"{count}: {refused} typed 4xx, {kept} kept; no 5xx, no room held afterwards")


async def test_odd_http_is_a_typed_4xx_or_a_closed_connection(server: Served, figure: Figure, prove: bool) -> None:
    count = 10_000 if prove else 1_000
    truth, family = canary(server), all_processes(server)
    outcomes = {"refused": 0, "served": 0, "closed": 0}

    async def each(number: int) -> None:
        data = odd_bytes(random.Random(number))
        result = await exchange(server.port, data)
        head, _, body = result.partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 100"):
            head, _, body = body.partition(b"\r\n\r\n")
        if not head:
            outcomes["closed"] += 1
            return
        status = int(head.split()[1])
        if status in (200, 204):
            outcomes["served"] += 1
        else:
            outcomes["refused"] += 1
            if data[:4] != b"HEAD":
                size = next(
                    int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")
                )
                check_error(status, body[:size], (number, data))

    await attacks(count, each)
    assert outcomes["refused"] > count // 4 and outcomes["closed"] < count // 2
    assert server.family() == family
    assert canary(server) == truth
    said = ", ".join(f"{number} {what}" for what, number in outcomes.items())
    figure("malformed HTTP", f"{count}: {said}; no 5xx, same processes, canary exact")
