"""A request as the front sends it to a worker: prompt, sampling parameters, and how its answer is read."""

from __future__ import annotations

import hashlib
import math
import struct
from typing import Literal

import msgspec

SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 10),
    "top_k": (-1, 1 << 31),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
"""Least and greatest value that a request or a model's recommendation may have."""


class SamplingExtras(msgspec.Struct, frozen=True, kw_only=True):
    """Samplers beyond the usual ones; `kernels.extras` defines them. Every default is "off"."""

    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    """How many of the last tokens DRY considers; -1: all."""
    dry_breakers: tuple[int, ...] = ()
    """Tokens that end a repetition."""
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    """Version of mirostat, 1 or 2, which keeps the tokens' surprise near `mirostat_tau` bits; 0: off."""
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens allowed; () for all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not occur in the answer."""

    @property
    def any(self) -> bool:
        """Whether any sampler is on."""
        cuts = self.typical_p < 1 or self.top_n_sigma > 0 or self.xtc_probability > 0 or self.dynatemp_range > 0
        return cuts or self.dry_multiplier > 0 or bool(self.mirostat or self.allowed_token_ids or self.bad_words)

    def mu_after(self, mu: float, surprise: float) -> float:
        """Return mirostat's state after a token: how surprising the next one may be, in bits."""
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
    """Whether the temperature is applied after top-k, top-p and min-p instead of before."""
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
    """None if all of them are off."""

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
    """What the output parser must know of a tool that may be called."""

    name: str
    values: tuple[str, ...] = ()
    """Parameters that are not strings: calls in XML tags write these as JSON."""
    shape: str = ""
    """Its schema without descriptions (`text/output/argument_fit.py`), as JSON; "" if any arguments are valid."""


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the front parses the model's text. All off: the text is passed on as it is."""

    reasoning: bool = False
    """Text between `<think>` and `</think>` is reasoning, not content."""
    thoughts: str = ""
    """Name of a further reasoning format in `text/output/reasoning_formats.py`."""
    reasoning_open: bool = False
    """The prompt already ends inside `<think>`."""
    reasoning_closed: bool = False
    """The prompt already ends behind `</think>`: the request switched reasoning off."""
    tools: bool = False
    """`<tool_call>` JSON becomes tool calls."""
    one_call: bool = False
    """The answer ends with its first tool call."""
    xml: bool = False
    """`<function=...>` tags inside `<tool_call>` become tool calls, too."""
    calls: str = ""
    """Name of a further format of tool calls in `text/output/call_formats.py`."""
    offered: tuple[OfferedTool, ...] = ()
    """The tools offered. An answer that is only the JSON object of a call to one of them is read as that call."""
    held: bool = False
    """Whether a grammar constrains calls, so that they are parsed strictly. Otherwise calls with missing markers or
    closing tags are read too, and so are calls in reasoning that nothing follows."""
    calls_only: bool = False
    """Whether the answer is constrained to calls: other text is not content, and a repeated call ends the answer."""
    continues: bool = False
    """Whether the answer continues the prompt's text, so that a leading space must be kept."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar that an answer is constrained to, after a trial compilation in a separate process."""

    text: str
    """The grammar in llguidance's syntax, reasoning included. It describes the text that `OutputFormat` parses,
    without control tokens."""
    bytes: int = 0
    """Memory of the compiled grammar."""
    growth: int = 0
    """Bytes that it grows by for each token of an answer, on average."""


Adapters = tuple[tuple[bytes, float], ...]
"""The adapters that change a model's numbers, in the order in which they are added: digest and scale of each."""

MAX_APPLIED = 4
"""Most adapters of one request."""
MAX_SCALE = 100.0
"""Largest magnitude of an adapter's scale."""
_ADAPTED = b"cairn adapted salt 1"


def adapted_salt(salt: bytes, adapters: Adapters) -> bytes:
    """Return the salt under which a tenant's contexts that were computed with these adapters are found.

    KV computed with other adapters, or with other scales of them, is never shared.
    """
    if not adapters:
        return salt
    digest = hashlib.sha256(_ADAPTED + struct.pack("<q", len(salt)) + salt)
    for adapter, scale in adapters:
        digest.update(struct.pack("<qf", len(adapter), scale) + adapter)
    return digest.digest()


Want = Literal["token", "hidden"]
"""Purpose of a row: the next token, or the hidden state for an embedding."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of one choice: everything a worker needs, and everything needed to restart on another worker.

    `generated` holds tokens that were sampled before (a worker died, a turn is continued); they are part of the
    context and count towards `max_tokens`, but are not sent again.
    """

    id: int
    """63 bits, never reused, not even after a restart."""
    prompt: tuple[int, ...]
    sampling: SamplingParams
    generated: tuple[int, ...] = ()
    mu: float | None = None
    """Mirostat's state after `generated`; None before the first token."""
    choice: int = 0
    """Index among the `n` choices of one call; part of the random seed."""
    stop: tuple[str, ...] = ()
    repetition_stop: bool = False
    """Whether to end the answer once it only repeats itself. Only the front uses it."""
    output: OutputFormat = OutputFormat()
    grammar: Grammar | None = None
    """Constraint on the answer; None for none."""
    reasoning_budget: int | None = None
    """Most tokens of reasoning; then its closing tag is forced. None: no limit."""
    salt: bytes = b""
    """The tenant's salt: contexts with different salts never share KV."""
    adapters: Adapters = ()
    """Adapters that it is computed with; () for the model as it is."""
    share: str = ""
    """Key for fair scheduling: the tenant's name, or the client's address if the server has no API keys."""
    timeout: float | None = None
    """Seconds from `add` after which the request ends with `DEADLINE`."""
    first_token_timeout: float | None = None
    """Seconds within which the front must receive the first token. Only the front uses it."""
    priority: int = 0
    """Higher runs earlier than others of the same share. Waiting raises it, so no request starves."""
    durable: bool = False
    """Whether this context's KV is stored earlier and evicted later than others': it belongs to an agent or a session,
    or contains an answer. Other contexts are stored last, unless long, until they are used a second time."""
    stored: bool = True
    """Whether its KV may be kept beyond the pool at all. Chunks hold the token ids, so a text that must not be stored
    must not be written there either."""
    progress: bool = False
    """Whether to send the prompt's progress after each step."""
    want: Want = "token"
    """`hidden`: nothing is generated; the last output has the text's `vector`."""
    second: int = 0
    """Index of the first token of a pair's second text, for models with token types; 0: a single text."""
    prediction: tuple[int, ...] = ()
    """What the client expects to be generated: guesses (`scheduler.drafts`), which change nothing but the speed."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt needs at least one token")
        if not 0 <= self.id < 1 << 63:
            raise ValueError("a request id is a positive 64-bit number")

    @property
    def kv_salt(self) -> bytes:
        """What separates its KV from that of other tenants and other adapters."""
        return adapted_salt(self.salt, self.adapters)

    @property
    def held(self) -> bool:
        """Whether a grammar or a reasoning budget constrains the answer."""
        return self.grammar is not None or self.reasoning_budget is not None
