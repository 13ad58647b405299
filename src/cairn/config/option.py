"""The fields of `Config` as options: their flags, variables, types, bounds and help."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any, Literal

import msgspec

from cairn.config.config import PREFIX, Config
from cairn.config.values import AdapterOptions, ModelOptions, Secret, TenantKeys

PANELS = (
    ("Model and engine", "model"),
    ("Scheduling", "max_running"),
    ("Stored KV", "kv_dir"),
    ("Text", "sampler_order"),
    ("Agents", "agents_dir"),
    ("Several machines", "shared_store"),
    ("Several models", "models"),
    ("Server", "host"),
    ("Limits on what one tenant may ask for", "requests_per_minute"),
    ("Limits on what a client may send", "lenient"),
)
"""Groups of options in the help: (title, the field of `Config` that begins the group)."""

_LOCAL_PANELS = ("Model and engine", "Scheduling", "Stored KV", "Text")
_SERVED_ONLY = ("served_name", "alias", "adapters", "strict_model", "store_kv")

SLIP = 0.84
"""Least similarity (difflib's ratio) of a misspelt word and the word that was meant: one letter of six may differ."""

Kind = Literal["int", "float", "str", "bool", "choice", "secret", "tenant", "model", "adapter"]


_FLAGS = {"adapters": "--adapter"}
"""Flags whose name is not that of their field."""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One field of `Config` as an option."""

    name: str
    kind: Kind
    many: bool
    default: Any
    choices: tuple[str, ...] = ()
    above: float | None = None
    """Exclusive lower bound."""
    least: float | None = None
    most: float | None = None
    help: str
    panel: str

    @property
    def flag(self) -> str:
        """The option's flag, such as --kv-gb."""
        return _FLAGS.get(self.name) or "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The option's environment variable, such as CAIRN_KV_GB."""
        return PREFIX + self.name.upper()

    @property
    def limits(self) -> str:
        """The bounds in words; empty without any."""
        low = f"more than {self.above:g}" if self.above is not None else ""
        low = f"at least {self.least:.15g}" if self.least is not None else low
        high = f"at most {self.most:.15g}" if self.most is not None else ""
        return " and ".join(part for part in (low, high) if part)


@cache
def options() -> tuple[Option, ...]:
    """Return all options, in the order of `Config`."""
    starts = {field: panel for panel, field in PANELS}
    panel = PANELS[0][0]
    found = []
    struct = msgspec.inspect.type_info(Config)
    assert isinstance(struct, msgspec.inspect.StructType)
    for field in struct.fields:
        panel = starts.get(field.name, panel)
        found.append(_option(field, panel))
    return tuple(found)


def local_options() -> tuple[str, ...]:
    """Return the names of the options that apply without a server: to `cairn chat`, `cairn generate` and `LLM`."""
    return tuple(one.name for one in options() if one.panel in _LOCAL_PANELS and one.name not in _SERVED_ONLY)


def _option(field: msgspec.inspect.Field, panel: str) -> Option:
    inspect = msgspec.inspect
    kind = field.type
    text = ""
    if isinstance(kind, inspect.Metadata):
        text = str((kind.extra_json_schema or {}).get("description", ""))
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        (kind,) = (part for part in kind.types if not isinstance(part, inspect.NoneType))
    many = isinstance(kind, inspect.VarTupleType)
    if isinstance(kind, inspect.VarTupleType):
        kind = kind.item_type
    choices: tuple[str, ...] = ()
    bounds: dict[str, float | None] = {}
    name: Kind
    if isinstance(kind, inspect.LiteralType):
        name, choices = "choice", tuple(str(value) for value in kind.values)
    elif isinstance(kind, inspect.IntType | inspect.FloatType):
        name = "int" if isinstance(kind, inspect.IntType) else "float"
        bounds = {"above": kind.gt, "least": kind.ge, "most": kind.le}
    elif isinstance(kind, inspect.BoolType):
        name = "bool"
    elif isinstance(kind, inspect.CustomType) and kind.cls is Secret:
        name = "secret"
    elif isinstance(kind, inspect.StructType) and kind.cls is TenantKeys:
        name = "tenant"
    elif isinstance(kind, inspect.StructType) and kind.cls is ModelOptions:
        name = "model"
    elif isinstance(kind, inspect.StructType) and kind.cls is AdapterOptions:
        name = "adapter"
    elif isinstance(kind, inspect.StrType):
        name = "str"
    else:
        raise TypeError(f"Config.{field.name} has a type that no flag can carry: {kind}")
    return Option(
        name=field.name, kind=name, many=many, default=field.default, choices=choices, help=text, panel=panel, **bounds
    )


OTHER_NAMES = {
    "n_ctx": "context",
    "num_ctx": "context",
    "ctx_size": "context",
    "max_model_len": "context",
    "max_seq_len": "context",
    "max_context": "context",
    "context_length": "context",
    "model_path": "model",
    "model_name": "model",
    "model_id": "model",
    "n_threads": "threads",
    "num_thread": "threads",
    "num_threads": "threads",
    "max_num_seqs": "max_running",
    "n_parallel": "max_running",
    "num_parallel": "max_running",
    "max_num_batched_tokens": "step_tokens",
    "n_batch": "step_tokens",
    "num_batch": "step_tokens",
    "tensor_parallel_size": "tp",
    "dtype": "weights",
    "torch_dtype": "weights",
    "quantization": "weights",
    "kv_cache_dtype": "kv_dtype",
    "type_k": "kv_dtype",
    "type_v": "kv_dtype",
    "cache_type_k": "kv_dtype",
    "cache_type_v": "kv_dtype",
    "kv_cache_memory_bytes": "kv_gb",
    "chat_format": "chat_template",
    "device_map": "device",
    "served_model_name": "served_name",
}
"""What other engines and libraries call an option -> its name here."""
SAMPLING_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}
"""What they call a sampling option -> its name here."""
_OF_GPUS = frozenset({"n_gpu_layers", "num_gpu", "gpu_memory_utilization"})


def right_name(word: str, known: Iterable[str]) -> str:
    """Return what an unknown option is called here, as the end of a sentence, or an empty string."""
    names = list(known)
    if word in OTHER_NAMES and OTHER_NAMES[word] in names:
        return f": it is called {OTHER_NAMES[word]} here"
    if word in _OF_GPUS:
        return ": the option device chooses where it is computed; leave this out"
    return closest(word, names)


LEAST_START = 3
"""Characters from which a word may be the beginning of the one that was meant: temp, temperature."""
MAX_WORD = 64
"""Characters of a word for which a near one is looked for: the comparison takes time that grows with their square."""
_ANSWERS = 256
"""Answers kept by each look-up: a client sends the same unknown fields with all its requests."""


def slip_of(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that another is most likely a slip of: spelt otherwise alone, or nearly so."""
    return None if len(word) > MAX_WORD else _slip_of(word, tuple(known))


@lru_cache(_ANSWERS)
def _slip_of(word: str, words: tuple[str, ...]) -> str | None:
    plain = _plain(word)
    alike = next((one for one in words if _plain(one) == plain), None)
    near = difflib.get_close_matches(word.lower(), words, n=1, cutoff=SLIP)
    return alike or (near[0] if near else None)


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def closest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` for the known word nearest to an unknown one, or an empty string."""
    return "" if len(word) > MAX_WORD else _closest(word, tuple(known))


@lru_cache(_ANSWERS)
def _closest(word: str, words: tuple[str, ...]) -> str:
    longer = [one for one in words if len(word) >= LEAST_START and one.startswith(word)]
    near = sorted(longer, key=len)[:1] or difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""
