"""Traces by OpenTelemetry: one span a call, and below it the parts of its time (`cairn.system.spans`).

The names are those of OpenTelemetry's conventions for HTTP servers and generative models
(opentelemetry.io/docs/specs/semconv), and `cairn.*` where these have none. A call that carries W3C's `traceparent` goes
on in that trace (w3.org/TR/trace-context). Nothing that was asked or answered stands in a span.

Spans go to `otlp_traces_endpoint` by OTLP over HTTP, in the background: where nobody takes them they are lost, and no
call waits. The SDK reads its usual variables, such as OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and
OTEL_EXPORTER_OTLP_HEADERS.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cairn import __version__
from cairn.api.http.call import HTTPCall
from cairn.config.config import Config
from cairn.system.interfaces import Clock
from cairn.system.spans import Span, Spans
from cairn.types.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

PATH = "/v1/traces"
"""The default path of a collector's traces."""
CLOSE_SECONDS = 2.0
"""How long the last spans may take at the end of a server."""


def endpoint_of(config: Config) -> str | None:
    """Return where spans go; None if traces are off.

    Raises ConfigError for an invalid address, and if the SDK is missing.
    """
    given = config.otlp_traces_endpoint
    if given is None:
        return None
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"otlp_traces_endpoint is {given!r} but must be an address such as http://127.0.0.1:4318",
            field="otlp_traces_endpoint",
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError:
        raise ConfigError(
            "otlp_traces_endpoint needs OpenTelemetry: pip install 'cairn-llm[otel]'", field="otlp_traces_endpoint"
        ) from None
    return given if parts.path.strip("/") else given.rstrip("/") + PATH


class CallTrace:
    """The span of one call."""

    __slots__ = ("_clock", "_span", "_tracer", "spans")

    def __init__(self, tracer: Tracer, span: OtelSpan, clock: Clock) -> None:
        self._tracer, self._span, self._clock = tracer, span, clock
        self.spans = Spans(self._tell)

    @property
    def id(self) -> str:
        """Id of the trace in W3C's form: 32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def _tell(self, part: Span) -> None:
        from opentelemetry.trace import set_span_in_context

        attributes = {f"cairn.{name}": value for name, value in part.attributes.items()}
        child = self._tracer.start_span(
            part.name,
            context=set_span_in_context(self._span),
            attributes=attributes,
            start_time=self._wall(part.began),
        )
        child.end(end_time=self._wall(part.ended))

    def _wall(self, at: float) -> int:
        """Convert a moment of the monotonic clock to nanoseconds of the wall clock."""
        return self._clock.time_ns() - int((self._clock.now() - at) * 1e9)

    def end(self, call: HTTPCall, error: str) -> None:
        """End the span. `error` is the code with which the call was refused or failed."""
        from opentelemetry.trace import Status, StatusCode

        span, route = self._span, call.route
        span.update_name(f"{call.scope['method']} {route}")
        span.set_attribute("http.route", route)
        span.set_attribute("http.response.status_code", call.status)
        span.set_attribute("cairn.tenant", call.tenant)
        span.set_attribute("cairn.request_id", call.id)
        if call.model:
            span.set_attribute("gen_ai.provider.name", "cairn")
            span.set_attribute("gen_ai.response.model", call.model)
        if call.tokens is not None:
            span.set_attribute("gen_ai.usage.input_tokens", call.tokens[0])
            span.set_attribute("gen_ai.usage.output_tokens", call.tokens[1])
        if error or call.ended:
            span.set_attribute("error.type", error or call.ended)
        if call.status >= 500 or (call.ended and call.ended != "client_left"):
            span.set_status(Status(StatusCode.ERROR))
        span.end()


class Tracing:
    """The traces of one server."""

    def __init__(self, processor: SpanProcessor, clock: Clock) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = {SERVICE_VERSION: __version__}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            named[SERVICE_NAME] = "cairn"
        self._provider: TracerProvider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("cairn", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._clock = clock

    @classmethod
    def of(cls, config: Config, clock: Clock) -> Tracing | None:
        """Return the traces that the options ask for; None if they are off. Raises ConfigError."""
        endpoint = endpoint_of(config)
        if endpoint is None:
            return None
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), clock)

    def begin(self, call: HTTPCall) -> CallTrace | None:
        """Begin the span of a call; None if its trace is not sampled."""
        from opentelemetry.trace import SpanKind

        carried = {name: value for name in ("traceparent", "tracestate") if (value := _text(call, name)) is not None}
        span = self._tracer.start_span(
            call.scope["method"],
            context=self._propagator.extract(carried),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": call.scope["method"], "url.scheme": call.scope.get("scheme", "http")},
            start_time=self._clock.time_ns(),
        )
        return CallTrace(self._tracer, span, self._clock) if span.is_recording() else None

    def close(self) -> None:
        """Send waiting spans for at most `CLOSE_SECONDS`; the rest is lost."""
        # The exporter tries for ten seconds if nobody takes spans, and exit would wait for a thread of a pool.
        thread = threading.Thread(target=self._provider.shutdown, name="cairn-traces", daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)


def _text(call: HTTPCall, name: str) -> str | None:
    value = call.header(name.encode())
    return None if value is None else value.decode("latin-1")
