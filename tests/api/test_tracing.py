"""OpenTelemetry traces as a collector sees them, and logs as JSON lines."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cairn.api.tracing import Tracing, endpoint_of
from cairn.config.config import Config
from cairn.config.values import Secret, TenantKeys
from cairn.frontend import service as service_module
from cairn.system.posix import JsonLines
from cairn.system.spans import PRESENT, Spans
from cairn.types.errors import ConfigError
from tests.api.sockets import Site, site
from tests.service.several import several
from tests.service.tiny import collect, make_model, request, serving

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PROMPT = "a prompt that nobody may log"
ASKED = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "temperature": 0}


class Collector:
    """An OTLP collector that keeps what it is sent, decoded."""

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                assert self.path == "/v1/traces", self.path
                collector.raw.append(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def spans(self) -> list[Any]:
        results = []
        for body in self.raw:
            request = ExportTraceServiceRequest()
            request.ParseFromString(body)
            for resource in request.resource_spans:
                names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
                assert names["service.name"] == "cairn"
                results += [span for scope in resource.scope_spans for span in scope.spans]
        return results

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    result = Collector()
    yield result
    result.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("traced") / "tiny")


def attributes(span: Any) -> dict[str, Any]:
    return {
        attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value")) for attribute in span.attributes
    }


async def flushed(at: Site) -> None:
    assert at.app.tracing is not None
    await asyncio.to_thread(at.app.tracing.close)


async def test_a_collector_sees_the_spans_of_a_request(folder: Path, collector: Collector) -> None:
    config = Config(otlp_traces_endpoint=collector.url)
    async with serving(folder) as service, site(service, config) as at, at.http() as http:
        answer = await http.post("/v1/chat/completions", json={**ASKED, "n": 2}, headers={"traceparent": PARENT})
        assert answer.status_code == 200
        assert (await http.post("/v1/chat/completions", json={"messages": []})).status_code == 400
        assert (await http.get("/health")).status_code == 200  # a probe, which leaves no trace
        await flushed(at)
    spans = collector.spans()
    server, refused = (span for span in spans if span.kind == 2)
    assert server.name == refused.name == "POST /v1/chat/completions"
    assert server.trace_id.hex() == PARENT.split("-")[1] and server.parent_span_id.hex() == PARENT.split("-")[2]
    assert refused.trace_id != server.trace_id and not refused.parent_span_id
    said = attributes(server)
    assert said["http.response.status_code"] == 200 and said["cairn.request_id"] == answer.headers["x-request-id"]
    assert said["gen_ai.response.model"] == "tiny" and said["gen_ai.usage.output_tokens"] == 12
    assert attributes(refused)["error.type"] == "invalid_request"
    children = [span for span in spans if span.parent_span_id == server.span_id]
    assert sorted(span.name for span in children) == ["decode"] * 2 + ["prefill"] * 2 + ["queue"] * 2
    of = {span.name: span for span in children if attributes(span)["cairn.choice"] == 0}
    assert server.start_time_unix_nano <= of["queue"].start_time_unix_nano
    order = [of[name] for name in ("queue", "prefill", "decode")]
    for one, next in itertools.pairwise(order):
        assert one.start_time_unix_nano <= one.end_time_unix_nano
        assert abs(one.end_time_unix_nano - next.start_time_unix_nano) < 2_000_000  # the two times come from two clocks
    assert of["decode"].end_time_unix_nano <= server.end_time_unix_nano + 2_000_000
    assert attributes(of["decode"])["cairn.completion_tokens"] == 6
    assert attributes(of["decode"])["cairn.finish_reason"] == "length"
    everything = b"".join(collector.raw)
    assert PROMPT.encode() not in everything


async def test_loading_a_model_is_a_span_and_a_trace_that_is_not_sampled_none(
    tmp_path: Path, collector: Collector
) -> None:
    config = Config(otlp_traces_endpoint=collector.url)
    async with several(tmp_path, "alpha beta") as models, site(models.services.first, config) as at, at.http() as http:
        at.app.state.open(models)
        unsampled = {"traceparent": PARENT[:-2] + "00"}
        assert (await http.post("/v1/chat/completions", json=ASKED, headers=unsampled)).status_code == 200
        answer = await http.post("/v1/chat/completions", json={**ASKED, "model": "beta"})
        assert answer.json()["model"] == "beta"
        await flushed(at)
    spans = collector.spans()
    assert [span.name for span in spans if span.kind == 2] == ["POST /v1/chat/completions"]
    (load,) = (span for span in spans if span.name == "load")
    assert attributes(load) == {"cairn.what": "model", "cairn.model": "beta"}


async def test_kv_that_is_loaded_is_a_span(folder: Path, tmp_path: Path) -> None:
    """A prompt whose KV is loaded from disk waits for it while it is queued."""
    prompt = tuple(range(20, 270)) * 2
    options = {"kv_dir": str(tmp_path / "kv"), "kv_load": "always"}
    for times in range(2):
        async with serving(folder, **options) as service:
            spans: list[Any] = []
            PRESENT.set(Spans(spans.append))
            answer = await collect(service.generate(request(service, prompt, durable=True)))
            await service.flush()
            if times:
                assert answer.cache.disk
                load, queue = (next(span for span in spans if span.name == name) for name in ("load", "queue"))
                assert queue.began <= load.began <= load.ended == queue.ended
                assert load.attributes["tokens"] == answer.cache.disk
    PRESENT.set(None)


async def test_without_traces_nothing_is_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    taken = service_module.RequestState

    def state(*given: Any) -> Any:
        seen.append(taken(*given))
        return seen[-1]

    monkeypatch.setattr(service_module, "RequestState", state)
    async with serving(folder) as service, site(service) as at, at.http() as http:
        assert at.app.tracing is None
        assert (await http.post("/v1/chat/completions", json=ASKED, headers={"traceparent": PARENT})).status_code == 200
    assert len(seen) == 1 and seen[0].spans is None


def test_an_endpoint_is_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert endpoint_of(Config()) is None
    assert endpoint_of(Config(otlp_traces_endpoint="http://host:4318/")) == "http://host:4318/v1/traces"
    assert endpoint_of(Config(otlp_traces_endpoint="https://host/other")) == "https://host/other"
    with pytest.raises(ConfigError, match="must be an address such as"):
        endpoint_of(Config(otlp_traces_endpoint="host:4318"))
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"cairn-llm\[otel\]"):
        Tracing.of(Config(otlp_traces_endpoint="http://host:4318"), None)  # type: ignore[arg-type]


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("cairn")
    before, level = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel("DEBUG")
    yield stream
    logger.removeHandler(handler)
    logger.propagate, logger.level = before, level


async def test_json_log_lines_name_tenant_request_and_times_but_no_texts(folder: Path, lines: io.StringIO) -> None:
    keys = (TenantKeys("ada", (Secret("key-of-ada"),)),)
    config = Config(tenants=keys, log_format="json")
    async with serving(folder) as service, site(service, config) as at, at.http() as http:
        headers = {"authorization": "Bearer key-of-ada", "x-request-id": "mine"}
        answer = await http.post("/v1/chat/completions", json=ASKED, headers=headers)
        said = answer.json()["choices"][0]["message"]["content"]
        stream = {**ASKED, "stream": True}
        assert (await http.post("/v1/chat/completions?q=secret", json=stream, headers=headers)).status_code == 200
        wrong = {"authorization": "Bearer wrong-key"}
        assert (await http.post("/v1/chat/completions", json=ASKED, headers=wrong)).status_code == 401
        bad = {"messages": [{"role": PROMPT, "content": PROMPT}], "response_format": PROMPT}
        assert (await http.post("/v1/chat/completions", json=bad, headers=headers)).status_code == 400
    text = lines.getvalue()
    results = [json.loads(line) for line in text.splitlines()]
    first, second, refused, bad_line = (result for result in results if result["logger"] == "cairn.access")
    assert first["tenant"] == "ada" and first["model"] == "tiny" and first["status"] == 200
    assert first["request_id"] == answer.headers["x-cairn-request-id"] and first["client_request_id"] == "mine"
    assert first["completion_tokens"] == 6 and first["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert all(first[name] >= 0 for name in ("duration_ms", "queue_ms", "prefill_ms", "decode_ms"))
    assert second["path"] == "/v1/chat/completions" and second["completion_tokens"] == 6
    assert (refused["status"], refused["error"]) == (401, "invalid_api_key") and "model" not in refused
    assert (bad_line["status"], bad_line["error"]) == (400, "invalid_request")
    assert said and all(secret not in text for secret in (PROMPT, said, "key-of-ada", "wrong-key", "q=secret"))
    assert all({"time", "level", "logger", "message"} <= set(result) for result in results)
