"""From a configuration and a folder to a loaded engine."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from cairn.config.config import Config
from cairn.engine.cpu_experts import asked_layers
from cairn.engine.machine import cpu_count
from cairn.engine.memory import pool_blocks
from cairn.models.files import is_gguf, reading
from cairn.models.gguf.reader import remembering
from cairn.models.safetensors.weights import open_weights, weight_files
from cairn.models.spec.config import identified, identity_of, load_spec
from cairn.models.spec.judge import with_judge
from cairn.types.errors import ModelError
from cairn.types.model_spec import ModelSpec
from cairn.types.step import Engine


def check_options(spec: ModelSpec, config: Config) -> None:
    """Raise `ModelError` for a context that is longer than the model's own, or experts that cannot be on the CPU."""
    asked_layers(spec, config)
    if config.context is not None and config.context > spec.context:
        raise ModelError(f"context is {config.context}, but {spec.name} was made for at most {spec.context} tokens")


CPU = ("cairn.engine.recorded", "cairn.engine.encoder")
FAKE = ("cairn.engine.mtp_head", "cairn.engine.fake", "cairn.kernels.choose", "numpy.random")
"""Modules that `load_engine` needs; the last is one that numpy itself imports where it is asked for."""


def import_engine(config: Config) -> None:
    """Import what `load_engine` will need, on this thread: two threads that import at once may see half a module."""
    for name in FAKE if config.engine == "fake" else CPU:
        importlib.import_module(name)


def check_files(config: Config, folder: Path) -> None:
    """Read the headers of all files of a model; raise ModelError if they cannot be served.

    Digests are remembered, so that loading does not compute them again; no memory is kept.
    """
    spec = with_judge(load_spec(folder, identify=False), folder, config.kind)
    check_options(spec, config)
    if config.engine != "fake":  # which reads no weights
        open_weights(folder, spec)
    identified(spec, folder)


def load_engine(
    config: Config,
    folder: Path,
    expected: int = 0,
    blocks: tuple[int, ...] = (),
    end: Callable[[str], None] = lambda stage: None,
) -> tuple[ModelSpec, Engine]:
    """Load the model in `folder` into the engine that `config.engine` names, whole, or raise ModelError.

    `expected`: bytes of stored KV that may be loaded into its pool soon. `blocks`: size of each group's pool, whatever
    memory is free; if empty, `pool_blocks` chooses it. `end` is called at the end of each stage.
    """
    with remembering():
        return _load_engine(config, folder, expected, blocks, end)


def _load_engine(
    config: Config, folder: Path, expected: int, blocks: tuple[int, ...], end: Callable[[str], None]
) -> tuple[ModelSpec, Engine]:
    before = _stamps(folder) if is_gguf(folder) or folder.is_dir() else []
    spec = with_judge(load_spec(folder, identify=False), folder, config.kind)
    check_options(spec, config)
    if config.engine == "fake":
        # Imported here so that a server never loads the code of an engine that it does not run.
        from cairn.engine.fake import FakeEngine
        from cairn.kernels.choose import load_sampler

        spec = identified(spec, folder)
        engine = FakeEngine(
            spec,
            blocks=blocks or pool_blocks(spec, config),
            context=config.context,
            max_rows=min(config.max_running, config.step_tokens),
            max_tokens=config.step_tokens,
            sampler=load_sampler(config.kernels, config.threads or cpu_count(), spec.vocab),
        )
        return spec, engine
    if config.tp > 1:
        if importlib.util.find_spec("torch") is None:
            from cairn.kernels.devices import NO_TORCH

            raise ModelError(f"tp is {config.tp}, but ranks meet through torch: {NO_TORCH}")
        from cairn.engine.parallel import ParallelEngine

        spec = identified(spec, folder)
        return spec, ParallelEngine.load(spec, folder, config, blocks)
    from cairn.engine.encoder import EncoderEngine
    from cairn.engine.recorded import RecordedEngine

    encodes = spec.whole
    fit = (
        None if encodes else RecordedEngine.fit(spec, folder, config, blocks)
    )  # its identity takes as long as reading all of its files
    end("headers")
    spec = identified(spec, folder)
    end("digests")
    changed = ModelError(f"{folder} was changed while it was loaded; start again")
    if _stamps(folder) != before:  # what was read of it would be another model's
        raise changed
    loaded = (
        EncoderEngine.load(spec, folder, config)
        if encodes
        else RecordedEngine.load(spec, folder, config, expected, fit=fit)
    )
    end("weights and programs")
    if identity_of(spec, folder) != spec.identity:  # its KV would be stored, and found, as the other model's
        loaded.close()
        raise changed
    return spec, loaded


def head_of(engine: Engine) -> Engine | None:
    """Return the engine of a model's MTP head, which is closed with the model's; None if it has none.

    Only `RecordedEngine` may have one.
    """
    found: Engine | None = getattr(engine, "ahead", None)
    return found


def _stamps(folder: Path) -> list[tuple[int, ...]]:
    """Return the facts of the weight files that change when one is written or replaced."""
    with reading(folder):
        found = [path.stat() for path in weight_files(folder)]
    return [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found]
