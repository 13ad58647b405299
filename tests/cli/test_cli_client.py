"""The command line's HTTP client."""

from __future__ import annotations

import contextlib
import http.server
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from cairn.api.chat.openai_chunks import usage_object
from cairn.cli import main
from cairn.cli.connection import client as client_module
from cairn.cli.connection.client import Client, connect
from cairn.cli.connection.http_stream import HttpStream
from cairn.config.resolve import resolve
from cairn.types.errors import (
    CairnError,
    ConfigError,
    Conflict,
    Damaged,
    GenerationFailed,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from cairn.types.outputs import Done, FinishReason, Usage
from cairn.types.stats import CacheReport, Miss

SAID = "one\u2028two\u2029three\u0085four \u4f60\U0001f600"


def stream(*pieces: bytes) -> HttpStream:
    return HttpStream(httpx.Response(200, content=iter(pieces)), "http://h")


def client(handler: Callable[[httpx.Request], httpx.Response]) -> Client:
    made = Client("http://h")
    made.close()
    made._http = httpx.Client(transport=httpx.MockTransport(handler))
    return made


def event(content: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'delta': {'content': content}}]}, ensure_ascii=False)}\n\n".encode()


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_only_a_line_feed_ends_a_line_wherever_the_bytes_are_cut(ending: bytes) -> None:
    data = (b": waiting\n\n" + event(SAID) + event("!") + b"data: [DONE]").replace(b"\n", ending)
    for cut in range(len(data) + 1):
        answering = stream(data[:cut], data[cut:])
        assert [delta.text for delta in answering] == [SAID, "!"]
    single = stream(*(data[at : at + 1] for at in range(len(data))))
    assert "".join(delta.text for delta in single) == single.answer.text == SAID + "!"


@pytest.mark.parametrize("miss", [None, Miss(position=16, reason="evicted")])
def test_the_cache_report_is_read_as_servers_write_it(miss: Miss | None) -> None:
    report = CacheReport(computed=3, pool=16, ram=1, disk=2, load=0.5, miss=miss)
    done = Done(reason=FinishReason.STOP, usage=Usage(prompt_tokens=22, completion_tokens=1), cache=report)
    result = json.dumps({"usage": usage_object([(done, True)])})
    answering = stream(f"data: {result}\n\ndata: [DONE]\n\n".encode())
    assert list(answering) == [] and answering.answer.cache == report


@pytest.mark.parametrize(
    "data",
    [
        *(
            "{",
            '"text"',
            "5",
            "[1]",
            '{"choices": [5]}',
            '{"choices": 5}',
            '{"usage": {"prompt_tokens": 1}}',
            "[" * 9999,
        ),
        *('{"choices": [{"delta": {"tool_calls": [{}]}}]}', '{"usage": 1}', "{'a': 1}", ""),
    ],
)
def test_an_unreadable_event_is_a_short_error(data: str) -> None:
    with pytest.raises(GenerationFailed, match=r"^the server at http://h sent an event that cannot be read$"):
        list(stream(event("half"), f"data: {data}\n\n".encode(), b"data: [DONE]\n\n"))


def test_an_event_that_is_not_utf_8_is_a_short_error() -> None:
    with pytest.raises(GenerationFailed, match="cannot be read"):
        list(stream(b'data: {"choices": [{"delta": {"content": "\xff"}}]}\n\n'))


def test_an_error_may_be_a_text() -> None:
    with pytest.raises(GenerationFailed, match=r"^out of luck$"):
        list(stream(b'data: {"error": "out of luck"}\n\n'))


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (404, {"message": "gone", "code": "not_found"}, NotFound),
        (409, {"message": "gone", "code": "conflict"}, Conflict),
        (409, {"message": "gone", "code": "damaged"}, Damaged),
        (500, {"message": "gone", "code": "of another server"}, CairnError),
        (500, {"message": "gone", "code": None}, CairnError),
        (404, {"message": "gone"}, CairnError),
    ],
)
def test_an_error_is_of_the_class_that_its_code_names(status: int, error: object, kind: type[CairnError]) -> None:
    with client(lambda _: httpx.Response(status, json={"error": error})) as one, pytest.raises(CairnError) as raised:
        one.post("/v1/agents", {})
    assert type(raised.value) is kind
    assert str(raised.value) == "gone"


def test_an_answer_that_breaks_off_is_a_short_error() -> None:
    def half() -> Iterator[bytes]:
        yield b"{"
        raise httpx.ReadError("")

    for status in (200, 500):
        with client(lambda _, status=status: httpx.Response(status, content=half())) as one:  # type: ignore[misc]
            with pytest.raises(Unavailable, match=r"^the connection to http://h was lost: ReadError$"):
                one.get("/v1/models")
            with pytest.raises(Unavailable):
                one.post("/tokenize", {})


def test_a_response_without_cairns_fields_is_no_cairn_server() -> None:
    with (
        pytest.raises(CairnError, match="the server at http://h is not a Cairn server"),
        client(lambda _: httpx.Response(200, json={"status": "ok"})) as one,
    ):
        one.get("/health/ready")["reasons"]


def test_an_unsendable_value_is_a_short_error() -> None:
    with client(lambda _: httpx.Response(200, json={})) as one:
        for odd in ("caf\udce9", float("nan")):
            with pytest.raises(InvalidRequest, match="this cannot be sent"):
                one.post("/tokenize", {"prompt": odd})


@pytest.mark.parametrize("body", [b"<html>", b"", b"\xff", b"[]", b"[" * 100_000])
@pytest.mark.parametrize("status", [200, 503])
def test_another_server_is_a_short_error(body: bytes, status: int) -> None:
    with client(lambda _: httpx.Response(status, content=body)) as one:
        for ask in (lambda: one.get("/health/ready"), lambda: one.get("/v1/models"), lambda: one.post("/tokenize", {})):
            with pytest.raises(
                CairnError, match=r"^(the server at http://h is not a Cairn server|the server answered 503)"
            ):
                ask()


def test_a_key_that_no_header_can_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match="API key"):
        Client("http://h", "schl\u00fcssel")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://127.0.0.1:8000"),
        ("[::]", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("[::1]", "http://[::1]:8000"),
    ],
)
def test_a_client_reaches_what_a_server_binds(host: str, url: str) -> None:
    with connect(resolve({"host": host}, {})) as made:
        assert made.url == url


@pytest.mark.parametrize("field", ["next", "last_id"])
def test_every_page_of_a_list_is_read(field: str) -> None:
    asked = []

    def page(request: httpx.Request) -> httpx.Response:
        asked.append(dict(request.url.params))
        last = len(asked) == 2
        return httpx.Response(200, json={"data": [{"id": f"a{len(asked)}"}], "has_more": not last, field: "a&1"})

    with client(page) as one:
        assert [item["id"] for item in one.items("/v1/teams")] == ["a1", "a2"]
    assert asked == [{"limit": "100"}, {"limit": "100", "after": "a&1"}]


@pytest.mark.parametrize("body", [{"ok": True}, {"deleted": False}])
def test_a_deletion_is_done_when_the_server_says_so(body: object) -> None:
    with (
        pytest.raises(CairnError, match="not a Cairn server"),
        client(lambda _: httpx.Response(200, json=body)) as one,
    ):
        one.delete("/v1/agents/a")
    with client(lambda _: httpx.Response(200, json={"deleted": True})) as one:
        one.delete("/v1/agents/a")


@pytest.mark.parametrize("host", ["..x", "x" * 70 + ".example"])
def test_an_impossible_host_name_is_a_short_error(host: str) -> None:
    with pytest.raises(Unavailable, match="no server answers at"):
        Client(host).get("/v1/models")


PRIVATE_CA = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg5MdwHTC35Cg9unjp
e6FKOTn8t0ewnfjf2JTlxivwbzuhRANCAAQDjbFsa7rLydfY4S7JXJAyJBya++ZT
15Px6EW5cMt+iCIcIrEocyfrby2UYoQ8rLVHNCQnWwTDYb1EC8+9eDWP
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBbDCCARKgAwIBAgIBATAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAlsb2NhbGhv
c3QwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBQxEjAQBgNVBAMM
CWxvY2FsaG9zdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABAONsWxrusvJ19jh
LslckDIkHJr75lPXk/HoRblwy36IIhwisShzJ+tvLZRihDystUc0JCdbBMNhvUQL
z714NY+jUzBRMA8GA1UdEwEB/wQFMAMBAf8wDgYDVR0PAQH/BAQDAgKEMB0GA1Ud
DgQWBBTo0FPFKFXos0uH6Le1+amZiFQGizAPBgNVHREECDAGhwR/AAABMAoGCCqG
SM49BAMCA0gAMEUCIECPcm0ErOHiQpUTGdWSQlwNaq/uSGvzS9FPfXI7BQaDAiEA
vE2M+a/k+VmxduiiRXSw3qgPKJL6iOu9fMdhtG1WMrk=
-----END CERTIFICATE-----
"""
"""A certificate for 127.0.0.1, valid until 2120, with its key; made for this test alone."""


@pytest.fixture
def private(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Yield a server whose certificate only its own CA vouches for, and the CA's file."""
    file = tmp_path / "ca.pem"
    file.write_text(PRIVATE_CA)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(file)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Late)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that does not trust it hangs up
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_address[1]}", file
    server.shutdown()
    server.server_close()


def test_a_private_authority_is_trusted_where_the_environment_names_it(
    private: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that cannot be verified is running nevertheless, so starting another would not help."""
    url, authority = private
    with Client(url) as one, pytest.raises(Unavailable, match=f"the server at {url} did not answer: .*CERTIFICATE"):
        one.get("/v1/cache")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    with Client(url) as one:
        assert one.get("/v1/cache")["model"] == "m"
    monkeypatch.setenv("SSL_CERT_FILE", "/there/is/none.pem")
    with pytest.raises(ConfigError, match="the certificates in SSL_CERT_FILE or SSL_CERT_DIR cannot be used: "):
        Client(url)
    with Client("http://127.0.0.1:1") as one, pytest.raises(Unavailable, match="start one with: cairn serve"):
        one.get("/v1/cache")


class Late(http.server.BaseHTTPRequestHandler):
    """A server that answers everything with a delay, as one that first reads a disk full of KV."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def do_GET(self) -> None:
        time.sleep(0.6)
        body = {"model": "m", "ram": None, "disk": None, "checked": 7, "removed": 0, "removed_bytes": 0, "queued": 0}
        body |= dict.fromkeys(("dropped", "deferred", "loaded", "load_seconds", "abandoned"), 0)
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client may be gone
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def late() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Late)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("order", "code"), [("scrub", 0), ("flush", 0), ("prune", 0), ("stats", 1)])
def test_only_orders_that_read_a_whole_store_have_no_timeout(
    order: str,
    code: int,
    late: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(client_module, "_TIMEOUT", httpx.Timeout(10, read=0.2))
    with pytest.raises(SystemExit) as ended:
        main(["cache", order, "--host", late])
    result = capsys.readouterr()
    assert ended.value.code == code, result.err
    assert ("did not answer" in result.err) == bool(code)
