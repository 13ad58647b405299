"""Every option, declared once: type, default, bounds and help.

Flags (`--kv-gb`), environment variables (`CAIRN_KV_GB`) and keys of cairn.toml (`kv_gb`) are generated from `Config`.
Precedence: flag, environment, file, default. Everything is resolved before anything is built and never written after.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class Secret:
    """A string that does not print itself."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "***"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash(self._value)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of one server or one local run. Sizes and times carry their unit in the name or the help."""

    # model and engine
    model: Annotated[str, Meta(description="A folder, a hub id (org/name), or 'demo' for the bundled model.")] = "demo"
    served_name: Annotated[str | None, Meta(description="Name that clients use for the model; default: its own.")] = None
    engine: Annotated[Literal["auto", "cpu", "fake"], Meta(description="What computes; 'fake' is for tests.")] = "auto"
    threads: Annotated[int | None, Meta(ge=1, le=1024, description="CPU threads; default: all cores.")] = None
    context: Annotated[
        int | None, Meta(ge=16, le=1 << 24, description="Longest context in tokens; default: the model's own.")
    ] = None
    kv_gb: Annotated[
        float | None, Meta(gt=0, le=1 << 16, description="KV pool in GB; default: a quarter of the free memory, at most what max_running full contexts need.")
    ] = None
    # scheduling
    max_running: Annotated[int, Meta(ge=1, le=4096, description="Most requests computed in one step.")] = 64
    step_tokens: Annotated[int, Meta(ge=16, le=1 << 16, description="Most tokens computed in one step.")] = 512
    max_queue: Annotated[int, Meta(ge=1, description="Most requests waiting; more are a 429.")] = 256
    max_queue_tokens: Annotated[int, Meta(ge=1, description="Most prompt tokens waiting; more are a 429.")] = 1 << 20
    request_timeout: Annotated[float, Meta(gt=0, description="Seconds after which a request ends.")] = 3600.0
    # text
    reasoning_history: Annotated[
        Literal["keep", "template"],
        Meta(description="'keep' puts reasoning that a client left out back into the prompt; 'template' leaves it to the chat template."),
    ] = "keep"
    template_timeout: Annotated[float, Meta(gt=0, le=60, description="Seconds a chat template may take.")] = 1.0
    # server
    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 picks a free one.")] = 8000
    api_key: Annotated[tuple[Secret, ...], Meta(description="Keys that clients may use; repeat for several.")] = ()
    admin_key: Annotated[Secret | None, Meta(description="Key for /metrics and other admin routes on a server with keys.")] = None
    unsafe_no_auth: Annotated[bool, Meta(description="Listen beyond this machine without any API key.")] = False
    allowed_hosts: Annotated[tuple[str, ...], Meta(description="Host headers to accept besides the address itself and localhost.")] = ()
    cors_origins: Annotated[tuple[str, ...], Meta(description="Web origins that may call the API; none by default.")] = ()
    metrics_prefix: Annotated[Literal["cairn", "vllm"], Meta(description="Prefix of the metric names.")] = "cairn"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="How much to log on stderr.")] = "info"
    shutdown_grace: Annotated[float, Meta(ge=0, description="Seconds that running requests may go on after SIGTERM.")] = 30.0
    heartbeat: Annotated[float, Meta(gt=0, description="Seconds between SSE comments while a stream waits.")] = 15.0
    # limits on what a client may send
    max_header_kib: Annotated[int, Meta(ge=1, description="Most KiB of request line and headers.")] = 32
    max_body_mib: Annotated[int, Meta(ge=1, description="Most MiB of request body.")] = 16
    header_timeout: Annotated[float, Meta(gt=0, description="Seconds to receive the headers.")] = 10.0
    body_timeout: Annotated[float, Meta(gt=0, description="Most seconds between two pieces of a body.")] = 30.0
    stream_buffer_kib: Annotated[int, Meta(ge=1, description="Most KiB kept for a client that reads slowly.")] = 256
    stream_stall: Annotated[float, Meta(gt=0, description="Seconds after which a client that does not read is cut.")] = 30.0
    max_json_depth: Annotated[int, Meta(ge=1, description="Deepest nesting of a JSON body.")] = 64
    max_messages: Annotated[int, Meta(ge=1, description="Most messages in a chat.")] = 4096
    max_tools: Annotated[int, Meta(ge=1, description="Most tools in a chat.")] = 128
    max_choices: Annotated[int, Meta(ge=1, description="Largest n.")] = 8
    max_connections: Annotated[int, Meta(ge=1, description="Most open connections; more are a 503.")] = 4096
