"""The values that cross Cairn's seams: requests, sampling options, events, model specs.

All are frozen and slotted. They are msgspec structs, so the same type that the front builds is what the wire between
front and worker carries. Invariants are checked where a value is built (`__post_init__`), once.
"""

from __future__ import annotations

import enum
import math
from typing import Literal

import msgspec

from cairn.stats import CacheReport

BLOCK_TOKENS = 16
"""Tokens in one KV block."""
CHUNK_BLOCKS = 4
"""Blocks in a chunk, which is what stores keep together."""
CHUNK_TOKENS = CHUNK_BLOCKS * BLOCK_TOKENS
"""Tokens in a chunk."""


class FinishReason(enum.StrEnum):
    """Why a generation ended. `STOP`: EOS, a stop token or a stop string; `LENGTH`: a token limit."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 10),
    "top_k": (-1, 1 << 31),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
"""Least and greatest value of what a request may ask and a model may suggest."""


class SamplingExtras(msgspec.Struct, frozen=True, kw_only=True):
    """Samplers beyond the usual ones, as `kernels.extras` says what they mean. Every default is "off"."""

    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    """Tokens that are looked at; -1: all."""
    dry_breakers: tuple[int, ...] = ()
    """Tokens that end a repetition."""
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    """1 or 2: which of its two forms keeps the surprise of the answer's tokens near `mirostat_tau`."""
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    allowed_token_ids: tuple[int, ...] = ()
    """No others may come; () for all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that the answer may not hold."""

    @property
    def any(self) -> bool:
        """Whether anything is on."""
        cuts = self.typical_p < 1 or self.top_n_sigma > 0 or self.xtc_probability > 0 or self.dynatemp_range > 0
        return cuts or self.dry_multiplier > 0 or bool(self.mirostat or self.allowed_token_ids or self.bad_words)

    def mu_after(self, mu: float, surprise: float) -> float:
        """Mirostat's state after a token: how surprising the next may be, in bits."""
        return mu - self.mirostat_eta * (surprise - self.mirostat_tau)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one token is chosen from the logits. Every default means "off" or "plain sampling".

    The order of application: bias and penalties on the logits, then temperature, then top-k, top-p, min-p; with
    `temperature_last` the temperature after these. `temperature == 0` is greedy. `stop_token_ids` is already resolved:
    it holds the model's EOS ids unless `ignore_eos` was asked for, so nothing below the front needs to know what EOS
    is.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature_last: bool = False
    """The cuts look at the distribution before the temperature, which then is of what they keep."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    extras: SamplingExtras | None = None
    """None where all of them are off."""

    def __post_init__(self) -> None:
        numbers: tuple[float, ...] = (self.temperature, self.top_p, self.min_p, self.repetition_penalty)
        numbers += (self.presence_penalty, self.frequency_penalty, *(bias for _, bias in self.logit_bias))
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError("sampling parameters must be finite numbers")
        if self.temperature < 0 or self.repetition_penalty <= 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ValueError("sampling parameter out of range")
        if self.max_tokens < 0 or self.min_tokens < 0 or self.top_k < 0 or self.top_logprobs < 0:
            raise ValueError("token counts must not be negative")

    @property
    def needs_history(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class OfferedTool(msgspec.Struct, frozen=True):
    """What reading a call needs to know of a tool that may be called."""

    name: str
    values: tuple[str, ...] = ()
    """Parameters whose schema wants something else than a text: a call in XML tags writes them as JSON."""


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the front reads the model's text. All off: the text is passed on as it is."""

    reasoning: bool = False
    """Text between `<think>` and `</think>` is reasoning, not content."""
    thoughts: str = ""
    """So is text in a further form, by its name in `text.thoughts`."""
    reasoning_open: bool = False
    """The prompt already ends inside `<think>`."""
    tools: bool = False
    """`<tool_call>` JSON becomes tool calls."""
    one_call: bool = False
    """The answer ends with its first tool call."""
    xml: bool = False
    """So do `<function=...>` tags in it."""
    calls: str = ""
    """So do calls in a further form, as `text.call_formats` names it."""
    offered: tuple[OfferedTool, ...] = ()
    """The tools there are: an answer that is nothing but the JSON object of a call to one of them is that call."""
    continues: bool = False
    """The answer goes on the prompt's own text: it is no text of its own, whose first space a decoder may drop."""


Want = Literal["token", "hidden"]
"""What a row is computed for: the next token, or the hidden state that a text's embedding is made of."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of one choice: everything a worker needs, and everything needed to start over elsewhere.

    `generated` holds tokens that were sampled before (a worker died, a turn is continued); they are part of the
    context and count towards `max_tokens`, but are not reported again.
    """

    id: int
    """64 bits, never repeats, also not after a restart."""
    prompt: tuple[int, ...]
    sampling: SamplingParams
    generated: tuple[int, ...] = ()
    mu: float | None = None
    """Mirostat's state after `generated`; None before the first token."""
    choice: int = 0
    """Index among the `n` choices of one call; part of the randomness."""
    stop: tuple[str, ...] = ()
    output: OutputFormat = OutputFormat()
    grammar: str = ""
    """What the answer has to be, reasoning included, as llguidance reads it; "" for anything. It is about the text as
    `output` reads it: control tokens that are no text are never part of it."""
    reasoning_budget: int | None = None
    """After so many tokens of reasoning the tag comes that ends it; None: it ends by itself."""
    salt: bytes = b""
    """The tenant's salt: contexts with different salts never share KV."""
    share: str = ""
    """Whose share of the server it takes: a tenant's name, or a client's address where there are no keys."""
    timeout: float | None = None
    """Seconds from `add` after which the request ends with `DEADLINE`."""
    first_token_timeout: float | None = None
    """When it ends where it has no token by then. The front alone looks at it: a token is there when it has it."""
    priority: int = 0
    """Higher runs earlier than others of the same share; waiting raises it, so nobody starves."""
    durable: bool = False
    """Keep this context's KV beyond the pool at first touch: an agent's, or one with an answer in it. Others are kept
    when they are long, or when they come a second time."""
    stored: bool = True
    """Whether its KV may be kept beyond the pool at all. Chunks hold the token ids, so a text that must not be stored
    must not come there either."""
    want: Want = "token"
    """`hidden`: nothing is generated; the last output has the text's `vector`."""
    second: int = 0
    """Where the second text of a pair begins, for a model whose two texts have types of their own; 0: there is one."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt needs at least one token")
        if not 0 <= self.id < 1 << 63:
            raise ValueError("a request id is a positive 64-bit number")

    @property
    def held(self) -> bool:
        """Whether not every token may come at every place of the answer."""
        return bool(self.grammar) or self.reasoning_budget is not None


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of one token under the raw distribution (before bias, penalties and temperature)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely (token, logprob) pairs, best first."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one choice, as the OpenAI API defines them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds a request spent; what the metrics record."""

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did to one request: the worker's side of an event.

    The last output of a request has `finish`; with `FinishReason.ERROR`, `error` is a sentence for the client. With
    `FinishReason.STOP` the last of `tokens` is the stop token: it counts as a completion token, and is no text if it is
    one of the model's own.
    """

    id: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Those of prompt positions 1, 2, ..., sent in pieces, in order, before the first sampled token."""
    finish: FinishReason | None = None
    error: str = ""
    mu: float | None = None
    """Mirostat's state after `tokens`, where that is on: for a request that goes on elsewhere."""
    cache: CacheReport | None = None
    """Set on the first output after the prompt was computed."""
    timing: Timing | None = None
    """Set with `finish`."""
    vector: bytes = b""
    """float32 in the machine's order: what a request that wants a hidden state has asked for, with `finish`."""


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a tool call. The first piece of a call carries `id` and `name`; pieces of `arguments` join to JSON."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New output of one choice. Any field may be empty; pieces of `text` join to exactly the decoded whole."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one choice. A generation that failed raises a typed error instead."""

    reason: FinishReason
    usage: Usage
    cache: CacheReport
    timing: Timing = Timing()
    vector: bytes = b""
    """float32, of a request that wants a hidden state."""
    unread_call: bool = False
    """Something in the text began as a call of a tool does and could not be read as one."""


Event = Delta | Done


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position scaling as transformers' `rope_scaling` defines it (`modeling_rope_utils`)."""

    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()
    """What each plain frequency is divided by, before anything else; () for nothing."""


class RotaryPositions(msgspec.Struct, frozen=True, kw_only=True):
    """How the positions of a group's layers turn queries and keys."""

    theta: float
    scaling: RopeScaling = RopeScaling()


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep the same kind of cache and therefore share one block table."""

    kind: Literal["full", "window", "state"]
    layers: tuple[int, ...]
    window: int = 0
    """Tokens a position may attend to, itself included. 0 for full attention."""
    rope: RotaryPositions | None = None
    """Where these layers have positions of their own; None: the model's."""
    numbers: int = 0
    """Of a state group: float32 numbers that each of its layers keeps for a sequence."""
    kv_heads: int | None = None
    head_dim: int | None = None
    """Where these layers have heads of their own; None: the model's."""
    once: bool = False
    """Whether what is kept of a token is kept once: its values are a part of its key."""
    pieces: bool = False
    """Whether positions are cut into pieces of the window's size, and one sees its own piece alone up to itself; what
    it sees lies in a window of that size too."""

    @property
    def sight(self) -> int:
        """The window as the kernels take it."""
        return -self.window if self.pieces else self.window


NEVER = 1e30
"""A frequency that is divided by this turns nothing, at any position."""

MAX_CONTEXT = 1 << 24
MAX_VOCAB = 1 << 22
MAX_HEAD_DIM = 1 << 10
"""The largest head of a model that is served: what the kernels take, and a bound on what a file may claim."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts in the place of the MLP: each token goes through a few of many."""

    count: int
    chosen: int
    """How many of them a token goes through."""
    ffn: int
    """Width of each."""
    layers: tuple[int, ...]
    """Which layers have them; the others have the plain MLP."""
    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    """How a router's scores are made parts: see `kernels.base.Kernels.route`."""
    normed: bool = False
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    correction: bool = False
    """Whether a bias is added to the parts for the choice alone."""
    bias: bool = False
    """Whether the router and the experts have biases."""
    gated: bool = True
    """Whether what an expert lets through goes through a gate, and not through the activation itself."""
    shared: int = 0
    """Width of an expert that every token goes through; 0: none."""
    shared_gate: bool = False
    weighs_input: bool = False
    """Whether a token's share is multiplied with what its expert takes, not with what that gives."""
    beside: bool = False
    """Whether they stand beside the MLP, with norms of their own and a number that each expert's share is multiplied
    with (Gemma 4)."""


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """Gemma 3n: a hidden state that is kept several times over, of which each layer computes one and corrects all
    (AltUp); what is learnt beside attention (LAuReL); gates of which only the largest are let through."""

    count: int
    active: int
    """Which of them layers compute."""
    rank: int
    """Width of what stands beside attention."""
    sparsity: tuple[float | None, ...] = ()
    """Of each layer: by how many deviations a gate has to pass the mean of all; None where all pass. () for all
    layers."""
    scaled: bool = True
    """Whether what each layer makes its input of is multiplied with a number for each column."""


class Uneven(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that are not alike (Gemma 4). Their heads differ by group; values are normed without a weight, and what a
    layer gives is multiplied by a number of its own, but where there are streams (Gemma 3n)."""

    kv_from: tuple[int, ...] = ()
    """Of each of the last layers, which have no keys and values, the layer whose they read."""
    keys_as_values: tuple[int, ...] = ()
    """Layers whose values are their keys, as they are before they are normed."""
    wide: tuple[int, ...] = ()
    """Layers whose MLP is twice as wide."""
    inputs: int = 0
    """Numbers that each layer gets of a token, beside what the layer before it gives; 0: nothing."""
    input_rows: int = 0
    """Rows of the table of these."""
    streams: Streams | None = None


class Recurrence(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep a state of one size for a sequence, however long it is, in the place of keys and values.

    `delta`: gated delta net. `mamba2`: Mamba 2. `conv`: LFM2's gated short convolution, which keeps nothing else.
    """

    kind: Literal["delta", "mamba2", "conv"]
    layers: tuple[int, ...]
    reach: int
    """Tokens that the convolution sees, the present one included."""
    heads: int = 1
    value_size: int
    """Numbers of a head's value: of `conv`, the width of all."""
    key_heads: int = 0
    """How many heads have keys and queries of their own (Mamba 2: groups of B and C)."""
    key_size: int = 0
    """Numbers of a key and of a query (Mamba 2: of B and of C)."""
    tiled: bool = False
    """Whether neighbouring heads have keys of different heads, and not of one."""
    conv_bias: bool = False
    bias: bool = False
    """Whether what goes in and comes out is projected with a bias."""
    step_limits: tuple[float, float] | None = None
    """Of Mamba 2: the least and the greatest step."""

    @property
    def channels(self) -> int:
        """Numbers of a token that are convolved."""
        return self.heads * self.value_size + 2 * self.key_heads * self.key_size

    @property
    def inner(self) -> int:
        """Numbers of a token's values."""
        return self.heads * self.value_size

    @property
    def numbers(self) -> int:
        """Numbers of a layer's state: the convolution's window, and a matrix for each head."""
        return (self.reach - 1) * self.channels + self.heads * self.key_size * self.value_size

    @property
    def projected(self) -> int:
        """Numbers of a token that come out of the projections before the convolution."""
        if self.kind == "conv":
            return 3 * self.channels
        return self.channels + self.inner + self.heads * (2 if self.kind == "delta" else 1)


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Attention over latents (MLA): of a token one vector is kept, of which all heads' keys and values are products."""

    rank: int
    """Width of the latent; as many numbers as are turned are kept beside it."""
    query_rank: int = 0
    """Width of what queries are products of; 0: of the hidden state itself."""
    plain: int
    """Numbers of a head's query and key that are not turned."""
    value: int
    """Numbers of a head's value."""
    neighbours: bool = True
    """Whether neighbours are turned as a pair, not numbers half of them apart."""
    bias: bool = False
    """Whether what makes latents has a bias."""
    eps: float = 1e-6
    """Of the norms of latents."""


Kind = Literal["chat", "embed", "rerank"]
Pooling = Literal["cls", "mean", "last"]


class Dense(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix that a pooled state is multiplied with, and what follows it."""

    place: str
    """Where its weights are: a folder in the model's own."""
    inputs: int
    outputs: int
    bias: bool = True
    activation: Literal["", "tanh"] = ""
    inside: bool = False
    """Whether its weights are among the model's own, under the name of its place."""


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """How a text's vector is made of its tokens' hidden states."""

    pooling: Pooling = "last"
    """The first token's, the mean of all, or the last token's."""
    max_tokens: int | None = None
    """Longest text in tokens, where that is less than the model's context."""
    prompts: dict[str, str] = {}
    """Words that stand before a text, by the names of what it is for."""
    prompt: str | None = None
    """The name of those that every text gets that names no others."""
    dense: tuple[Dense, ...] = ()
    """What the pooled state goes through, in order."""


class Judge(msgspec.Struct, frozen=True, kw_only=True):
    """How a decoder judges a pair of texts: by what it would say, the logit of `yes` less that of `no`."""

    yes: int
    no: int
    """Rows of the output's matrix: token ids."""
    apart: bool = False
    """Whether the two rows are a matrix of their own."""


class EncoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What makes an encoder of a transformer: every token sees all of its text, and nothing is kept."""

    positions: Literal["learned", "rotary"] = "learned"
    first_position: int = 0
    """Row of the learned positions' table that the first token has."""
    position_rows: int = 0
    type_rows: int = 0
    """Rows of the tables of positions and of token types; 0 where there is none."""
    norm_first: bool = False
    """Whether norms stand before attention and MLP, and one at the end, and not behind each."""
    norm_bias: bool = True
    fused: bool = False
    """Whether queries, keys and values are one matrix, and gates and what they let through another."""
    gated: bool = False
    windows: tuple[int, ...] = ()
    """Of each layer: how far a token sees to both sides, itself counted; 0: all. () for all layers."""
    local: RotaryPositions | None = None
    """The positions of layers with a window, where they have their own."""
    labels: int = 0
    """Scores of the head of a model that judges texts; 0 where there is none."""
    head: Literal["", "tanh", "norm"] = ""
    """What stands between the pooled state and its scores: a matrix and tanh, or a matrix, GELU and a norm."""
    head_bias: bool = True

    def window(self, layer: int) -> int:
        """A layer's window."""
        return self.windows[layer] if self.windows else 0


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer as data: everything the forward pass and the KV cache depend on."""

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    """Longest context in tokens that the model was made for."""
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    long_rope: RopeScaling | None = None
    """What takes its place where contexts longer than its `original_context` are served."""
    long: bool = False
    """Whether they are: see `served`."""
    activation: Literal["silu", "gelu_tanh", "gelu", "clamped_silu", "relu2", "xielu"] = "silu"
    """The activation of the MLP."""
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    post_norms: bool = False
    """Whether what attention and the MLP give is normed before it is added."""
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """What scores are multiplied by; None: 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    """With a number c, a score s becomes c tanh(s / c)."""
    logit_softcap: float = 0.0
    """The same of logits."""
    pre_norms: bool = True
    """Whether what attention and the MLP take is normed."""
    qk_norm_whole: bool = False
    """Whether `qk_norm` is over all heads together."""
    late_norms: bool = False
    """Whether queries and keys are turned first and normed then."""
    rotary: int | None = None
    """How many numbers of a head are turned, from the first on; None: all."""
    unturned: tuple[int, ...] = ()
    """Layers that know no positions."""
    query_scaling: tuple[float, float] | None = None
    """(b, context): queries are multiplied by 1 + b log(1 + floor(position / context))."""
    unturned_scaling: tuple[float, float] | None = None
    """The same of layers that know no positions, with the position of the next token."""
    plain_norm: bool = False
    """Whether queries and keys are normed without a weight, but in layers that know no positions."""
    sinks: bool = False
    """Whether each head has a score that takes a share of the softmax and gives nothing."""
    residual_scale: float = 1.0
    """What is multiplied with what attention and the MLP give."""
    logit_scale: float = 1.0
    experts: Experts | None = None
    tied: bool = False
    groups: tuple[CacheGroup, ...]
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    defaults: dict[str, float] = {}
    """Sampling defaults of generation_config.json: temperature, top_k, top_p, min_p, repetition_penalty."""
    identity: bytes = b""
    """SHA-256 over everything above that could change a number, the weights and the tokenizer."""
    kind: Kind = "chat"
    """What its files say that it was made for."""
    embedding: Embedding = Embedding()
    encoder: EncoderSpec | None = None
    """Of a model that is no decoder; it has no cache groups."""
    both: bool = False
    """Whether a decoder's tokens see what follows them too."""
    judge: Judge | None = None
    """Of a decoder that judges pairs of texts."""
    latent: Latent | None = None
    """Of a decoder that keeps latents; its `head_dim` is that of queries."""
    uneven: Uneven | None = None
    """Of a decoder whose layers are not alike; its `head_dim` and `kv_heads` are those of layers with a window."""
    recurrence: Recurrence | None = None
    """Of layers without attention."""
    mlp_layers: tuple[int, ...] | None = None
    """Where a layer is either what mixes tokens or an MLP: those that are an MLP. None: every layer is both."""
    mlp_gated: bool = True
    """Whether what the MLP lets through goes through a gate, and not through the activation itself."""
    output_gate: bool = False
    """Whether each head's query has a gate behind it, through which what attention gives goes."""

    @property
    def whole(self) -> bool:
        """Whether texts are computed whole, in one step each, and nothing is kept: an encoder's, and a decoder's whose
        vectors are made of more than the last token's state."""
        return self.encoder is not None or self.both or (self.kind == "embed" and self.embedding.pooling != "last")

    def keeps_state(self, layer: int) -> bool:
        """Whether a layer keeps a state in the place of attention."""
        return self.recurrence is not None and layer in self.recurrence.layers

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP, or experts."""
        return self.mlp_layers is None or layer in self.mlp_layers

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention."""
        return not self.keeps_state(layer) and (self.mlp_layers is None or layer not in self.mlp_layers)

    @property
    def width(self) -> int:
        """Numbers in a vector."""
        return self.embedding.dense[-1].outputs if self.embedding.dense else self.hidden

    @property
    def turned(self) -> int:
        """How many numbers of a head are turned."""
        return self.head_dim if self.rotary is None else self.rotary

    def group_of(self, layer: int) -> int:
        """The group whose cache a layer reads; -1 where it reads none."""
        source = self.kv_layer(layer)
        return next((number for number, group in enumerate(self.groups) if source in group.layers), -1)

    def kv_layer(self, layer: int) -> int:
        """The layer that writes the keys and values which a layer reads."""
        sources = self.uneven.kv_from if self.uneven is not None else ()
        at = layer - (self.layers - len(sources))
        return sources[at] if at >= 0 and sources else layer

    def turned_in(self, group: int) -> int:
        """How many numbers of a head of a group are turned."""
        return self.rotary or self.groups[group].head_dim or self.head_dim

    def page(self, group: int) -> tuple[int, ...]:
        """The shape of what one layer of a group keeps of a block: keys and values [2, K, tokens, D], what both are
        made of [1, 1, tokens, D], or a state."""
        own = self.groups[group]
        if own.kind == "state":
            return (own.numbers,)
        return 1 if own.once else 2, own.kv_heads or self.kv_heads, BLOCK_TOKENS, own.head_dim or self.head_dim

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Numbers in a row of a page, of each group."""
        return tuple(self.page(group)[-1] for group in range(len(self.groups)))

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text whose embedding the model was made for."""
        return min(self.context, self.embedding.max_tokens or self.context)

    def served(self, context: int) -> ModelSpec:
        """The spec with which contexts of at most so many tokens are computed.

        Which rotary positions a model has may depend on that, and never on a text: keys that were turned in one way
        cannot be read in the other, and a cached prefix has to be as good as a computed one.
        """
        long = self.long_rope is not None and context > self.long_rope.original_context
        return msgspec.structs.replace(self, long=long)

    def rope(self, group: int) -> RotaryPositions:
        """The positions of a group's layers."""
        usual = self.long_rope if self.long and self.long_rope is not None else self.rope_scaling
        return self.groups[group].rope or RotaryPositions(theta=self.rope_theta, scaling=usual)
