"""`cairn doctor`: what this machine has, what would compute and why not, and what fits."""

from __future__ import annotations

import platform

import typer

from cairn.cli.options import LOCAL, configured
from cairn.config import Config
from cairn.errors import CairnError
from cairn.resolve import Resolved
from cairn.types import BLOCK_TOKENS

Rows = list[tuple[str, str]]

GB = 1e9


def register(app: typer.Typer) -> None:
    """Add `cairn doctor`."""

    @app.command(rich_help_panel="This machine")
    @configured(LOCAL)
    def doctor(resolved: Resolved) -> None:
        """Show what this machine has, which engine would compute, and whether a model fits."""
        from cairn.cli.output import sections

        config = resolved.config
        sections([("Machine", machine()), ("Engines", engines(config)), ("Models", models(config))])


def machine() -> Rows:
    """Cores, instruction sets, memory and GPUs."""
    from cairn.engine import device

    found = device.gpus()
    from cairn import __version__

    return [
        ("Cairn", f"{__version__} on Python {platform.python_version()}"),
        ("CPU", device.cpu_name()),
        ("cores", f"{device.cpu_count()} that this process may use"),
        ("instructions", " ".join(device.instruction_sets()) or "not told by the system"),
        ("free memory", f"{device.memory_available() / GB:.1f} GB"),
        ("GPU", ", ".join(f"{gpu.name} ({gpu.kind})" for gpu in found) or "none"),
    ]


def engines(config: Config) -> Rows:
    """What each engine would use, or why it is not used."""
    from cairn.engine import device

    threads = config.threads or device.cpu_count()
    fake = config.engine == "fake"
    rows = [
        (
            "cpu",
            f"not used: the engine is set to {config.engine}"
            if fake
            else f"used: numpy kernels, float32, {threads} threads",
        ),
        ("fake", "used: no model is computed, for tests" if fake else "not used: it is for tests"),
    ]
    for gpu in device.gpus():
        rows.append((gpu.kind, f"not used: {gpu.name} is here, but this version has no engine for GPUs"))
    return rows


def models(config: Config) -> Rows:
    """The chosen model, the bundled one and those downloaded: what each needs, and whether that fits."""
    from cairn.models import hub

    names = [config.model, hub.DEMO, *(model.name for model in hub.downloaded())]
    rows = [(name, _fit(name, config)) for name in dict.fromkeys(names)]
    return [*rows, ("others", _largest()), ("downloads", f"are kept in {hub.cache_folder()}")]


def _fit(name: str, config: Config) -> str:
    """One model in a sentence."""
    from cairn.engine import device
    from cairn.models import hub
    from cairn.models.spec import load_spec

    try:
        folder = hub.locate(name)
        spec = load_spec(folder, identify=False)
        free = device.memory_available()
        blocks = device.pool_blocks(spec, config, free)
        device.check_memory(spec, config, blocks, free)
    except CairnError as error:
        return f"no: {str(error).removeprefix(f'{name}: ')}"
    sizes = device.block_bytes(spec)
    pool = sum(count * size for count, size in zip(blocks, sizes, strict=True))
    context = min(spec.context, config.context or spec.context)
    tokens = min(blocks) * BLOCK_TOKENS
    return (
        f"fits: {_size(device.weight_bytes(spec))} of weights; {_size(pool)} of KV pool holds {tokens:,} tokens, "
        f"context {context:,}"
    )


def _largest() -> str:
    """A rule of thumb: weights in float32 beside a KV pool of a quarter of the free memory."""
    from cairn.engine import device

    return f"fit up to about {device.memory_available() * 0.7 / 4 / 1e9:.1f} billion parameters (weights in float32)"


def _size(size: float) -> str:
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / 1e6:.0f} MB"


__all__ = ["engines", "machine", "models", "register"]
