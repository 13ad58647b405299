"""How a token is chosen from the logits: what a request asks of the sampler.

Frozen and slotted msgspec structs, as all values that cross Cairn's seams: the type that the front builds is what the
wire between front and worker carries. Invariants are checked where a value is built (`__post_init__`), once.
"""

from __future__ import annotations

import math

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
