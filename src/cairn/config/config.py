"""Every option, declared once: type, default, bounds and help.

Flags (`--kv-gb`), environment variables (`CAIRN_KV_GB`) and keys of cairn.toml (`kv_gb`) are generated from `Config` by
`cairn.config.option`; `cairn.config.resolve` finds their values. A configuration is never changed once it is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cairn.config.values import LIMITS, AdapterOptions, ModelOptions, Secret, TenantKeys, TenantLimits, TenantTurns

PREFIX = "CAIRN_"
"""Prefix of the environment variables that set options. One that names no option is an error."""


DEVICE = re.compile(r"(cuda|rocm):\d{1,3}|auto|cpu|torch-cpu|triton-cpu|cuda|rocm|mps|mlx|mlx-cpu")
DEVICES = "auto, cpu, mlx, mlx-cpu, torch-cpu, triton-cpu, cuda, cuda:N, rocm, rocm:N or mps"
"""Values of `device`: a pattern to check them, and a list for messages."""

SPECULATE = re.compile(r"auto|off|[1-9]|1[0-5]")
SPECULATIONS = "auto, off or a number from 1 to 15"
"""Values of `speculate`: a pattern to check them, and a list for messages."""

CPU_EXPERTS = re.compile(r"auto|all|off|[1-9]\d{0,3}")
CPU_LAYERS = "auto, all, off or a number of layers from 1 to 9999"
"""Values of `cpu_experts`: a pattern to check them, and a list for messages."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of one server or one local run. Sizes and times carry their unit in the name or the help."""

    # model and engine
    model: Annotated[
        str,
        Meta(
            description="A folder, a .gguf file, a hub id (org/name, org/name:Q4_K_M), 'smollm2', which is downloaded "
            "when it is first served, or 'demo', bundled."
        ),
    ] = "demo"
    served_name: Annotated[str | None, Meta(description="Name that clients use for the model; default: its own.")] = (
        None
    )
    alias: Annotated[
        tuple[str, ...], Meta(description="Another name that clients may use for the model; repeat for more.")
    ] = ()
    adapters: Annotated[
        tuple[AdapterOptions, ...],
        Meta(
            description="A LoRA adapter to load with the model, as NAME=PATH of a PEFT folder or a .gguf file; "
            "requests name it as MODEL:NAME. Repeat for more. In cairn.toml: [[adapters]] with name, path, and on a "
            "server with several models model."
        ),
    ] = ()
    strict_model: Annotated[
        bool,
        Meta(
            description="Refuse requests that name another model, with 404. Without it they are answered by the one "
            "there is, and the answer tells its name."
        ),
    ] = False
    tokenizer: Annotated[
        str | None,
        Meta(
            description="A tokenizer.json, or a folder with one, in place of the model's own; what lies beside it, "
            "such as tokenizer_config.json, belongs to it. It must not have more tokens than the model."
        ),
    ] = None
    kind: Annotated[
        Literal["auto", "rerank"],
        Meta(
            description="What the model is for; 'auto': what its files say, 'rerank': a Qwen3 that judges pairs of "
            'texts by "yes" and "no", as Qwen3-Reranker does.'
        ),
    ] = "auto"
    engine: Annotated[Literal["auto", "cpu", "fake"], Meta(description="What computes; 'fake' is for tests.")] = "auto"
    device: Annotated[
        str,
        Meta(
            description="What the model is computed on: 'cpu', or 'torch-cpu', 'cuda:N', 'rocm:N' or 'mps' with the "
            "extra gpu, or 'mlx' with the extra mlx; 'auto': the fastest that keeps answers equal bit for bit, which "
            "is the CPU."
        ),
    ] = "auto"
    tp: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Ranks that share each layer (tensor parallel), each a process with a part of the weights and "
            "of the KV; with cuda:N and rocm:N, neighbouring GPUs from N on. Needs the extra gpu, also on the CPU.",
        ),
    ] = 1
    kernels: Annotated[
        Literal[
            "auto",
            "reference",
            "portable",
            "avx2",
            "avxvnni",
            "avx512vnni",
            "avx512",
            "amx",
            "neon",
            "neoni8mm",
            "metal",
        ],
        Meta(
            description="What the CPU computes with; 'auto': the fastest that runs here, 'reference' is numpy. 'metal' "
            "is for device mlx: a kernel of Cairn's own for recurrent layers, which was never run on an Apple GPU."
        ),
    ] = "auto"
    weights: Annotated[
        Literal["auto", "stored", "f32", "bf16", "int8", "int4"],
        Meta(
            description="What weights are held in: 'stored' as the model's files have them, 'int8' and 'int4' rounded "
            "in groups of 32; 'auto': as stored, and f32 for a model of less than 34 million parameters."
        ),
    ] = "auto"
    keep_packed: Annotated[
        bool,
        Meta(
            description="Keep the packed weights of models from 64 MiB in the user's cache folder, "
            "so that the next start need not pack them."
        ),
    ] = True
    keep_packed_gb: Annotated[
        Annotated[float, Meta(gt=0, le=1 << 20)] | None,
        Meta(
            description="Most GB of packed weights that are kept, of all models; default: a fifth of what the disk has "
            "free or they hold, at most 50. Those that no start has used for longest go first."
        ),
    ] = None
    experts: Annotated[
        Literal["auto", "memory", "mapped"],
        Meta(
            description="Where a model's experts are: in 'memory', or 'mapped' from their packed copy on the disk, of "
            "which the system reads what is used; 'auto': mapped where memory has no room for them."
        ),
    ] = "auto"
    cpu_experts: Annotated[
        str,
        Meta(
            description="Whose experts the CPU computes while a GPU computes all else: 'all', those of the first N "
            "layers, or 'off'; 'auto': all where the model does not fit the GPU otherwise."
        ),
    ] = "auto"
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None, Meta(description="CPU threads; default: all cores.")
    ] = None
    profile: Annotated[
        str | None,
        Meta(
            description="File of options that 'cairn tune MODEL' has measured to be fastest, or 'none'; default: the "
            "model's own on this machine, if there is one. Options that are set go before it."
        ),
    ] = None
    context: Annotated[
        Annotated[int, Meta(ge=16, le=1 << 24)] | None,
        Meta(description="Longest context in tokens; default: the model's own."),
    ] = None
    kv_gb: Annotated[
        Annotated[float, Meta(gt=0, le=1 << 16)] | None,
        Meta(
            description="KV pool in GB; default: a quarter of the free memory, "
            "at most what max_running full contexts need."
        ),
    ] = None
    kv_dtype: Annotated[
        Literal["auto", "f32", "bf16", "f16", "q8"],
        Meta(
            description="Type of KV in the pool and in stores; 'auto': f32 for models of less than 64 MiB (in 16 "
            "bits), else bf16. 'f16' is eight times finer than bf16; a model whose keys or values might pass its "
            "largest number, 65,504, is held in bf16 all the same, and the start says so. 'q8' takes half the memory "
            "of bf16 and rounds to 8 bits; it needs 'cairn cache check-codec MODEL --kv-dtype q8' first."
        ),
    ] = "auto"
    # scheduling
    max_running: Annotated[int, Meta(ge=1, le=4096, description="Most requests computed in one step.")] = 64
    step_tokens: Annotated[int, Meta(ge=16, le=1 << 16, description="Most tokens computed in one step.")] = 512
    step_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="Most seconds between two tokens of a stream while another's prompt is read beside it.",
        ),
    ] = 0.25
    speculate: Annotated[
        str,
        Meta(
            description="Tokens that a step may guess and check, from what the sequence repeats or by the model's own "
            "head for further tokens: 'auto', as many as make answers faster by the times measured here, 'off', or a "
            "number from 1 to 15, wherever something guesses. Answers are the same; on GPUs, where a number might "
            "change them, 'auto' is off."
        ),
    ] = "auto"
    draft_model: Annotated[
        str | None,
        Meta(
            description="A small model with the same tokens, named as MODEL is, that guesses where nothing repeats. It "
            "is held beside the model, and asked where that makes answers faster."
        ),
    ] = None
    draft_kv_gb: Annotated[float, Meta(gt=0, le=1 << 10, description="KV pool of the draft model in GB.")] = 0.25
    max_queue: Annotated[int, Meta(ge=1, description="Most requests waiting; more are a 429.")] = 256
    max_queue_tokens: Annotated[int, Meta(ge=1, description="Most prompt tokens waiting; more are a 429.")] = 1 << 20
    max_queue_pools: Annotated[
        float,
        Meta(
            gt=0,
            description="Most KV of waiting requests, as estimated, in multiples of the pool; more are a 429.",
        ),
    ] = 32.0
    request_timeout: Annotated[float, Meta(gt=0, description="Seconds after which a request ends.")] = 3600.0
    # stored KV
    kv_dir: Annotated[
        str | None,
        Meta(
            description="Folder that keeps KV beyond the pool and a restart; default for 'serve': cairn/kv in the "
            "user's cache folder, elsewhere none."
        ),
    ] = None
    kv_disk: Annotated[bool, Meta(description="Keep KV in kv_dir.")] = True
    kv_disk_gb: Annotated[
        Annotated[float, Meta(gt=0, le=1 << 20)] | None,
        Meta(
            description="Most GB in kv_dir; default: a fifth of what the disk has free or the folder holds, at most 50."
        ),
    ] = None
    kv_codec: Annotated[
        Literal["raw", "q8"],
        Meta(
            description="How KV is written in kv_dir. 'q8' takes a quarter of the room of f32, half of that of bf16 or "
            "f16, and rounds: answers from loaded KV may differ; it needs 'cairn cache check-codec' first."
        ),
    ] = "raw"
    kv_ram_gb: Annotated[
        Annotated[float, Meta(ge=0, le=1 << 20)] | None,
        Meta(
            description="GB of host memory for KV that leaves the pool, faster than the disk; default: a quarter of "
            "what is free if the pool is in a GPU's own memory, otherwise none. 0: none."
        ),
    ] = None
    kv_load: Annotated[
        Literal["auto", "always", "never"],
        Meta(description="Load stored KV; 'auto': where that is faster than to compute it, as measured."),
    ] = "auto"
    store_kv: Annotated[
        Literal["asked", "always"],
        Meta(
            description='"store": false in a request keeps its KV and the tokens of its answer off the disk, so that '
            "nothing of it is found again after a restart; 'always' keeps them all the same. Some agents send it "
            "unasked (codex, pi)."
        ),
    ] = "asked"
    kv_write_gb: Annotated[
        float,
        Meta(
            ge=0,
            description="GB of KV that are written in any 24 hours for each model, whatever for and over restarts; one "
            "chunk more at most. Half of it is kept for contexts with an agent, a session or an answer.",
        ),
    ] = 100.0
    kv_ttl: Annotated[
        float,
        Meta(ge=0, description="Seconds that unused KV is kept in kv_dir; 0 keeps it until its room is needed."),
    ] = 30 * 86400.0
    kv_fresh: Annotated[
        bool, Meta(description="Set a kv_dir aside that cannot be used as a store, and start a new one in its place.")
    ] = False
    # text
    sampler_order: Annotated[
        Literal["default", "llama"],
        Meta(
            description="Order of samplers where a request lists none: 'default' applies the temperature before top_k, "
            "top_p and min_p, as transformers and vLLM do, 'llama' after them, as llama.cpp does."
        ),
    ] = "default"
    default_temperature: Annotated[
        Annotated[float, Meta(ge=0, le=10)] | None,
        Meta(
            description="Temperature where a request names none; default: what the model's files or makers say, or 0.8."
        ),
    ] = None
    default_top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=1 << 31)] | None,
        Meta(description="top_k where a request names none, 0 for off; default: the model's, or 40."),
    ] = None
    default_top_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="top_p where a request names none, 1 for off; default: the model's, or 0.95."),
    ] = None
    default_min_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="min_p where a request names none, 0 for off; default: the model's, or 0.05."),
    ] = None
    reasoning_history: Annotated[
        Literal["keep", "template"],
        Meta(
            description="'keep' puts reasoning that a client left out back into the prompt; "
            "'template' leaves it to the chat template."
        ),
    ] = "keep"
    tool_instructions: Annotated[
        bool,
        Meta(
            description="Where the chat template shows no tools: tell the model of them in the first message, and of "
            "calls as JSON in <tool_call> tags. Off, tools are refused there."
        ),
    ] = True
    chat_template: Annotated[
        str | None,
        Meta(
            description="Chat template in place of the model's own: a name (chatml, llama3, gemma, mistral, ...) "
            "or a file."
        ),
    ] = None
    template_timeout: Annotated[
        float, Meta(gt=0, le=60, description="Seconds of processor time a chat template may take.")
    ] = 1.0
    # agents
    agents_dir: Annotated[
        str | None,
        Meta(description="Folder of the token log that keeps agents; default: cairn/agents in the user's data folder."),
    ] = None
    log: Annotated[
        bool,
        Meta(
            description="Keep answers to ordinary requests in the token log for 7 days, so that a conversation that "
            "is sent again after a restart finds their very tokens. Stored KV holds token ids too: where no text may "
            'stay on the disk, give --no-kv-disk as well, or send "store": false.'
        ),
    ] = True
    # several machines
    shared_store: Annotated[
        str | None,
        Meta(
            description="Folder or object store (s3://bucket/prefix, gs://, az://) that several servers share: agents "
            "and their KV go there too, so that any of them can go on with any agent; needs cluster_key_file."
        ),
    ] = None
    shared_lag: Annotated[
        float,
        Meta(gt=0, le=3600, description="Seconds within which computed KV is to be in the shared store."),
    ] = 2.0
    cluster_key_file: Annotated[
        str | None,
        Meta(
            description="File with the keys that everything in the shared store is encrypted with, the same on all "
            "servers; 'cairn cluster key FILE' makes one."
        ),
    ] = None
    role: Annotated[
        Literal["both", "prefill", "decode"],
        Meta(
            description="What a router gives this server of a cluster: 'prefill' computes long prompts for others, "
            "which load their KV from shared_store, and 'decode' answers; needs shared_store."
        ),
    ] = "both"
    # several models
    models: Annotated[
        tuple[ModelOptions, ...],
        Meta(
            description="The models of a server that has several: repeat MODEL. In cairn.toml: [[models]] with model, "
            "name, aliases, kv_share, pin, ttl, load, and options of the model alone such as weights and context."
        ),
    ] = ()
    models_dir: Annotated[
        str | None,
        Meta(
            description="Folder whose models (folders and .gguf files) can be asked for by name; each is loaded by the "
            "first request that names it."
        ),
    ] = None
    max_loaded: Annotated[
        int,
        Meta(ge=1, le=64, description="Most models loaded at once; the one that was not used for longest makes room."),
    ] = 8
    memory_gb: Annotated[
        Annotated[float, Meta(gt=0, le=1 << 16)] | None,
        Meta(
            description="GB of memory for all loaded models: weights, KV pools and buffers; default: what is free when "
            "a model is loaded."
        ),
    ] = None
    load_timeout: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="Seconds that a request waits while its model is loaded; beyond that it is a 503 with "
            "Retry-After.",
        ),
    ] = 60.0
    model_ttl: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds without requests after which a model is unloaded, the only one too; 0 is never.",
        ),
    ] = 0.0
    # server
    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 picks a free one.")] = 8000
    api_key: Annotated[
        tuple[Secret, ...],
        Meta(description="Key that clients may use; repeat for several. @FILE reads keys from a file, one a line."),
    ] = ()
    tenants: Annotated[
        tuple[TenantKeys, ...],
        Meta(
            description="A tenant and a key of it, or @FILE; repeat for more. Tenants share no agents and no KV. "
            "In cairn.toml: [tenants.NAME] with api_key."
        ),
    ] = ()
    admin_key: Annotated[
        Secret | None,
        Meta(description="Key for /metrics and other admin routes on a server with keys; @FILE reads it."),
    ] = None
    admin_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="Port of a listener of their own for /metrics and the other admin routes; default: none."),
    ] = None
    admin_host: Annotated[str, Meta(description="Address of that listener.")] = "127.0.0.1"
    unsafe_no_auth: Annotated[bool, Meta(description="Listen beyond this machine without any API key.")] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Host headers to accept besides localhost, host.docker.internal and the literal addresses of "
            "this machine and of private networks."
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Web origins that may call the API, such as https://app.example; none by default. "
            "'localhost' stands for pages of this machine on any port, '*' for every page."
        ),
    ] = ()
    page: Annotated[
        bool,
        Meta(description="Answer browsers at / with a page: chat, the tree of contexts, what goes on, what was saved."),
    ] = True
    docs: Annotated[bool, Meta(description="Describe the API at /openapi.json and for people at /docs.")] = True
    metrics_prefix: Annotated[Literal["cairn", "vllm"], Meta(description="Prefix of the metric names.")] = "cairn"
    verbose: Annotated[
        bool, Meta(description="Log what the start took, stage by stage, in the server and in each worker.")
    ] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="How much to log on stderr.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(
            description="How lines of the log look: for people, or each a JSON object. No text of a request is there."
        ),
    ] = "text"
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(
            description="Where traces go by OpenTelemetry's protocol over HTTP, such as http://127.0.0.1:4318; needs "
            "the extra otel. Default: nowhere."
        ),
    ] = None
    shutdown_grace: Annotated[
        float, Meta(ge=0, description="Seconds that running requests may go on after SIGTERM.")
    ] = 30.0
    heartbeat: Annotated[float, Meta(gt=0, description="Seconds between SSE comments while a stream waits.")] = 15.0
    reconnect_grace: Annotated[
        float, Meta(ge=0, description="Seconds that a resumable request runs on after its connection closed.")
    ] = 60.0
    max_resumable_mib: Annotated[
        int, Meta(ge=1, description="Most MiB kept of resumable answers; the oldest are given up first.")
    ] = 64
    tls_cert: Annotated[
        str | None, Meta(description="File with the certificate chain (PEM) for HTTPS; with tls_key.")
    ] = None
    tls_key: Annotated[str | None, Meta(description="File with the certificate's private key (PEM).")] = None
    # what one tenant may ask for
    requests_per_minute: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 31)] | None,
        Meta(
            description="Most requests a minute of one tenant, without keys of one client; more are a 429. In "
            "cairn.toml [tenants.NAME] can say otherwise, and give a weight."
        ),
    ] = None
    tokens_per_minute: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 40)] | None,
        Meta(description="Most tokens a minute of one tenant, of prompts and answers together; more are a 429."),
    ] = None
    max_concurrent: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)] | None,
        Meta(description="Most requests of one tenant at once; more are a 429."),
    ] = None
    input_tokens_per_minute: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 40)] | None, Meta(description="Prompt tokens a minute.")
    ] = None
    output_tokens_per_minute: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 40)] | None, Meta(description="Tokens of answers a minute.")
    ] = None
    max_agents: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)] | None,
        Meta(description="Most agents that one tenant keeps; more are a 403. Default: 10,000."),
    ] = None
    max_disk_mib: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 31)] | None,
        Meta(
            description="Most MiB that agents, teams, runs, collections and files of one tenant take on the disk; what "
            "would take more is a 403. Stored KV is not counted."
        ),
    ] = None
    # limits on what a client may send
    lenient: Annotated[
        bool,
        Meta(
            description="Also ignore misspelt fields (temprature), with a warning as for unknown ones; without it they "
            "are a 400 unless a request has the header X-Cairn-Lenient: 1."
        ),
    ] = False
    strict_fields: Annotated[
        bool,
        Meta(
            description="Refuse unknown fields in chats and completions with 400. Without it they are passed over, and "
            "told in the header X-Cairn-Warning and the answer's 'warnings'."
        ),
    ] = False
    images: Annotated[
        Literal["refuse", "text"],
        Meta(
            description="What becomes of an image or file that a user has just sent, as models here read text: "
            "'refuse' answers 400, 'text' puts a text with its digest in its place. Those of earlier messages and of "
            "tools are replaced in any case."
        ),
    ] = "refuse"
    max_header_kib: Annotated[int, Meta(ge=1, description="Most KiB of request line and headers.")] = 32
    max_body_mib: Annotated[int, Meta(ge=1, description="Most MiB of request body.")] = 16
    max_bodies_mib: Annotated[
        int,
        Meta(
            ge=1,
            description="Most MiB of request bodies held at once, from their first byte to the end of the answer; one "
            "of several tenants may have half of them.",
        ),
    ] = 256
    max_import_mib: Annotated[
        int, Meta(ge=1, description="Most MiB of an imported agent, or of a form with a file.")
    ] = 256
    header_timeout: Annotated[float, Meta(gt=0, description="Seconds to receive the headers.")] = 10.0
    body_timeout: Annotated[float, Meta(gt=0, description="Most seconds between two pieces of a body.")] = 30.0
    min_body_rate: Annotated[
        int, Meta(ge=0, description="Fewest bytes a second of a body that takes longer than body_timeout.")
    ] = 1024
    idle_timeout: Annotated[float, Meta(gt=0, description="Seconds that a connection may stay open unused.")] = 75.0
    stream_buffer_kib: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Most KiB kept for a client that reads slowly.")
    ] = 256
    stream_stall: Annotated[
        float, Meta(gt=0, description="Seconds after which a client that does not read is cut.")
    ] = 30.0
    max_json_depth: Annotated[int, Meta(ge=1, description="Deepest nesting of a JSON body.")] = 64
    max_json_values: Annotated[int, Meta(ge=1, description="Most values in a JSON body; an eighth may be objects.")] = (
        1 << 18
    )
    max_messages: Annotated[int, Meta(ge=1, description="Most messages in a chat.")] = 4096
    max_tools: Annotated[int, Meta(ge=1, description="Most tools in a chat.")] = 1024
    max_choices: Annotated[int, Meta(ge=1, description="Largest n.")] = 8
    max_prompts: Annotated[int, Meta(ge=1, description="Most prompts in one text completion.")] = 128
    max_connections: Annotated[int, Meta(ge=1, description="Most open connections; more are a 503.")] = 4096


def draft_options(config: Config) -> Config:
    """Return the options with which the draft model is loaded: one sequence at a time, in a pool of its own."""
    return msgspec.structs.replace(
        config,
        model=config.draft_model or "",
        draft_model=None,
        speculate="off",
        tokenizer=None,
        kind="auto",
        weights="auto",
        cpu_experts="auto",
        kv_gb=config.draft_kv_gb,
        max_running=1,
        step_tokens=min(config.step_tokens, 256),
    )


def limits_of(config: Config) -> Callable[[str], TenantLimits]:
    """Return a function from a tenant's name to its limits."""
    default = TenantLimits(**{name: getattr(config, name) for name in LIMITS})
    named = {one.name: _with(one.limits, default) for one in config.tenants}
    return lambda tenant: named.get(tenant, default)


def _with(limits: TenantLimits, default: TenantLimits) -> TenantLimits:
    """Return a tenant's limits with the server's filled in."""
    lacking = {name: getattr(default, name) for name in LIMITS if getattr(limits, name) is None}
    return msgspec.structs.replace(limits, **lacking)


def turns_of(config: Config) -> TenantTurns:
    """Return the scheduler's settings of the tenants that the options name."""
    limits = {one.name: one.limits for one in config.tenants}
    return TenantTurns(
        {name: one.weight for name, one in limits.items() if one.weight != 1},
        {name: one.priority for name, one in limits.items() if one.priority},
    )
