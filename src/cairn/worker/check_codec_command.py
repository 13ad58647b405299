"""`cairn cache check-codec`: compare a model's KV in 8 bits with its plain KV, and record the result in the KV folder.

Checked is the codec `q8` of stored KV, or with `--kv-dtype q8` a pool of that type against one of the usual type.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cairn.config.config import Config
from cairn.config.paths import expanded, with_folder
from cairn.kv.disk.codec import Q8, state_groups
from cairn.kv.disk.codec_comparison import POOL_Q8, POSITIONS, Comparison, compare, judged, predict, remember
from cairn.kv.disk.folder import open_folder
from cairn.models.hub.hub import locate
from cairn.models.spec.config import check_decodes, load_spec
from cairn.system.interfaces import Clock, FileSystem
from cairn.text.chat.templates import load_text
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import ConfigError
from cairn.types.model_spec import CHUNK_BLOCKS, ModelSpec
from cairn.types.step import Engine, EngineInfo
from cairn.worker.stores import keyed

_CONTEXT = 2048
_STEP = 512


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of a check."""

    model: str
    folder: Path
    """The KV folder that records it."""
    found: Comparison
    raw_bytes: int
    """Bytes of one token's plain KV, all groups together, without states."""
    bytes: int
    """Bytes of one token's KV in 8 bits."""


def check_codec(
    config: Config, files: FileSystem, clock: Clock, env: Mapping[str, str], text: Path | None
) -> CheckResult:
    """Compare 8-bit KV with plain KV over the first 2,000 tokens of `text`; by default, of Cairn's own source.

    Raises `ConfigError` for a text that is too short or a folder that is not a KV store, `Conflict` if a server has the
    store open, `ModelError`, and `OSError` if the result cannot be written.
    """
    compared = _compare_pools if config.kv_dtype == "q8" else _compare_codec
    folder = locate(config.model, dict(env))
    tokens = _tokens(load_text(folder, config.tokenizer)[0], text)
    store = _store(config, env)
    lock = open_folder(files, store, clock, fresh=config.kv_fresh, patience=5.0, sleep=time.sleep)
    try:
        spec, identity, found, raw_bytes, coded_bytes = compared(config, folder, tokens)
        remember(files, store, identity, found)
    finally:
        lock.release()
    return CheckResult(config.served_name or spec.name, store, found, raw_bytes, coded_bytes)


def _compare_codec(config: Config, folder: Path, tokens: list[int]) -> tuple[ModelSpec, bytes, Comparison, int, int]:
    """Check the codec; return (model, identity of the KV it stores, result, plain bytes, coded bytes for a token)."""
    spec, engine = _load(config, folder)
    try:
        codec = _codec(spec, engine)
        found = compare(engine, codec, tokens)
        info = keyed(engine.info, codec.name)
    finally:
        engine.close()
    stored = sum(codec.size(group) for group in _kept(info)) // (CHUNK_BLOCKS * info.block_tokens)
    return spec, info.identity, found, _token_bytes(info), stored


def _compare_pools(config: Config, folder: Path, tokens: list[int]) -> tuple[ModelSpec, bytes, Comparison, int, int]:
    """Check a q8 pool, loading the model twice in turn; returns the same as `_compare_codec`."""
    predictions, infos = [], []
    for dtype in ("auto", "q8"):
        spec, engine = _load(msgspec.structs.replace(config, kv_dtype=dtype), folder)
        try:
            if dtype == "q8" and engine.info.kv_dtype != "int8":
                raise ConfigError(f"kv_dtype: the engine {config.engine} has no q8 pool", field="kv_dtype")
            predictions.append(predict(engine, tokens))
            infos.append(engine.info)
        finally:
            engine.close()
    plain, coded = infos
    found = judged(POOL_Q8, plain.kv_dtype, *predictions)
    return spec, coded.identity, found, _token_bytes(plain), _token_bytes(coded)


def _kept(info: EngineInfo) -> list[int]:
    """Return the numbers of the groups with KV (not states)."""
    return [group for group in range(len(info.groups)) if group not in state_groups(info.groups)]


def _token_bytes(info: EngineInfo) -> int:
    return sum(info.block_bytes[group] for group in _kept(info)) // info.block_tokens


def _store(config: Config, env: Mapping[str, str]) -> Path:
    named = with_folder(msgspec.structs.replace(config, kv_disk=True), env).kv_dir
    assert named is not None  # a server always has one
    return expanded(named).absolute()


def _load(config: Config, folder: Path) -> tuple[ModelSpec, Engine]:
    """Load the model with room for one short sequence. The changed options do not affect any number."""
    from cairn.engine.load_engine import load_engine

    context = min(check_decodes(load_spec(folder, identify=False)).context, config.context or _CONTEXT, _CONTEXT)
    small = msgspec.structs.replace(config, context=context, max_running=1, step_tokens=_STEP, kv_gb=None)
    return load_engine(small, folder)


def _codec(spec: ModelSpec, engine: Engine) -> Q8:
    try:
        return Q8(engine.info.block_bytes, spec.head_dims, engine.info.kv_dtype, state_groups(engine.info.groups))
    except ValueError as error:
        raise ConfigError(f"q8 cannot hold the KV of {spec.name}: {error}", field="kv_codec") from error


def _tokens(tokenizer: Tokenizer, text: Path | None) -> list[int]:
    """Return the first 2,001 tokens of the text: one more than is predicted."""
    if text is None:
        sources = sorted((Path(__file__).parents[1] / "entrypoints").glob("*.py"))
        content = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    else:
        try:
            content = text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text: {text} cannot be read as UTF-8 text: {error}") from error
    tokens = tokenizer.encode_prompt(content, special=False)
    if len(tokens) <= POSITIONS:
        raise ConfigError(
            f"--text: {text or 'the text'} has {len(tokens):,} tokens in this model's tokenizer; the check needs at "
            f"least {POSITIONS + 1:,}"
        )
    return tokens[: POSITIONS + 1]
