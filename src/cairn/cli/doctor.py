"""`cairn doctor`: this machine's hardware, the device that would compute, and which models fit."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cairn.cli.common.options import configured
from cairn.config.config import Config
from cairn.config.resolve import Resolved, usual_file
from cairn.types.errors import CairnError
from cairn.types.model_spec import BLOCK_TOKENS

if TYPE_CHECKING:
    from cairn.engine.memory import WeightMemory

Rows = list[tuple[str, str]]

GB = 1e9

SIZING = (
    "model",
    "engine",
    "device",
    "kernels",
    "weights",
    "experts",
    "cpu_experts",
    "keep_packed",
    "threads",
    "context",
    "kv_gb",
    "kv_dtype",
    "max_running",
    "step_tokens",
    "agents_dir",
    "kv_dir",
)
"""Options that decide which device computes, whether a model fits, and where data is stored."""


def register(app: typer.Typer) -> None:
    """Add `cairn doctor`."""

    @app.command(rich_help_panel="This machine")
    @configured(SIZING)
    def doctor(resolved: Resolved) -> None:
        """Show this machine's hardware, which device would compute, and whether models fit."""
        from cairn.cli.common.output import sections

        config = resolved.config
        rows = [("Machine", _machine()), ("Engines", _engines(config)), ("Models", _models(config))]
        sections([*rows, ("Folders", folders(resolved, os.environ)), ("Agents", [("token log", _log(config))])])


def _machine() -> Rows:
    """Return the version, the CPU, its cores and instruction sets, free memory and GPUs."""
    from cairn import __version__
    from cairn.engine import machine

    gpus = ", ".join(f"{gpu.name} ({gpu.kind})" for gpu in machine.gpus())
    return [
        ("Cairn", f"{__version__} on Python {platform.python_version()}"),
        ("CPU", machine.cpu_name()),
        ("cores", f"{machine.cpu_count()} that this process may use"),
        ("instructions", " ".join(machine.instruction_sets()) or "not reported by the system"),
        ("free memory", f"{machine.memory_available() / GB:.1f} GB"),
        ("GPU", gpus or "none"),
    ]


def _engines(config: Config) -> Rows:
    """Return for each device what it would use, or why it is not used."""
    from cairn.engine import machine
    from cairn.kernels import devices

    try:
        used = "" if config.engine == "fake" else devices.resolved(config.device)
    except CairnError as error:
        return [("device", f"no: {error}")]
    cpu = _kernels(config) if used == devices.CPU else f"not used: {'the engine' if not used else 'the device'} is set"
    rows = [("cpu", f"{cpu} to fake" if not used else cpu if used == devices.CPU else f"{cpu} to {used}")]
    rows.append(("fake", "not used: it is for tests" if used else "used: no model is computed, for tests"))
    reports = {report.name: report for report in devices.reports(config.kernels) if report.name != devices.CPU}
    if used not in ("", devices.CPU, *reports):
        reports[used] = devices.report(used)
    for name, report in reports.items():
        state = "" if report.trouble else "used: " if name == used else f"not used (--device {name} chooses it): "
        rows.append((name, f"{state}{report.sentence}"))
    seen = {name.partition(":")[0] for name in reports}
    for gpu in machine.gpus():
        kind = devices.MLX if gpu.kind == "metal" else gpu.kind
        if kind not in seen:
            rows.append((gpu.kind, f"not used: {gpu.name} is here, but {devices.report(kind).trouble}"))
    return rows


def _kernels(config: Config) -> str:
    """Return which kernels the CPU would run, and why."""
    from cairn.engine import machine
    from cairn.kernels.choose import described

    try:
        return f"used: {described(config.kernels)}, {config.threads or machine.cpu_count()} threads"
    except CairnError as error:
        return f"no: {error}"


def _models(config: Config) -> Rows:
    """Return for the chosen model, the bundled one and the downloaded ones what each needs and whether it fits."""
    from cairn.models.hub import hub

    names = [config.model, hub.DEMO, *(model.name for model in hub.downloaded())]
    rate = _read_rate(config)
    rows = [(name, _fit(name, config, rate)) for name in dict.fromkeys(names)]
    return [*rows, ("others", _largest(config))]


def _read_rate(config: Config) -> float:
    """Return about how many bytes per second kernels read from memory; 0 without kernels."""
    from cairn.engine import machine
    from cairn.kernels import roofline
    from cairn.kernels.choose import chosen
    from cairn.system.posix import SystemClock

    if config.engine == "fake":
        return 0.0
    try:
        return roofline.read_rate(chosen(config.kernels), config.threads or machine.cpu_count(), SystemClock().now)
    except CairnError:
        return 0.0


def _fit(name: str, config: Config, rate: float = 0.0) -> str:
    """Say in a sentence whether a model fits. `rate`: bytes per second read from memory, 0 if not known."""
    from cairn.cli.common.output import amount
    from cairn.engine import memory
    from cairn.engine.cpu_experts import divided, sentence
    from cairn.engine.load_engine import check_options
    from cairn.kv.pool.cache import ANY, longest
    from cairn.models.hub import hub
    from cairn.models.packing.weight_format import HeldWeights, form_of
    from cairn.models.safetensors.weights import open_weights
    from cairn.models.spec.config import load_spec

    try:
        folder = hub.locate(name)
        spec = load_spec(folder, identify=False)
        check_options(spec, config)
        free = memory.device_memory(config)
        held = HeldWeights(open_weights(folder, spec), form_of(spec, config.weights))
        weights = memory.placed(spec, config, divided(spec, config, held, free), free)
        blocks = memory.pool_blocks(spec, config, free, weights)
        memory.check_memory(spec, config, blocks, free, weights)
    except CairnError as error:
        return f"no: {str(error).removeprefix(f'{name}: ')}"
    sizes = memory.block_bytes(spec, memory.kv_dtype(spec, config))
    pool = sum(count * size for count, size in zip(blocks, sizes, strict=True))
    context = min(spec.context, config.context or spec.context)
    tokens = longest(spec.groups, blocks, BLOCK_TOKENS)
    holds = "any context" if tokens == ANY else f"{tokens:,} tokens"
    mapped = f" and {amount(weights.mapped)} of experts on the disk" if weights.mapped else ""
    beside = f"; {experts}" if (experts := sentence(config, weights)) else ""
    return (
        f"fits: {amount(weights.held)} of weights{mapped} ({held.note()}); {amount(pool)} of KV pool holds {holds}, "
        f"context {context:,}{beside}{_speed(weights, rate)}; {spec.architecture} in {', '.join(held.formats())}"
    )


def _speed(weights: WeightMemory, rate: float) -> str:
    """Return the speed limit of an answer: each token reads the weights once. "" if the rate is not known."""
    read = weights.read(1) + weights.head
    if not rate or not weights.head:
        return ""
    condition = " while its experts are in memory" if weights.mapped else ""
    return f"; an answer has at most about {rate / read:,.0f} tokens/s here{condition}"


def folders(resolved: Resolved, env: Mapping[str, str]) -> Rows:
    """Return the folders that a server with these options uses, each with its size."""
    from cairn.api.data_folders import agents_folder
    from cairn.config.paths import expanded, with_folder
    from cairn.models.hub import hub
    from cairn.models.hub.addresses import registry_folder
    from cairn.models.packing import packed_file

    config = with_folder(resolved.config, env)
    agents = agents_folder(config, env)
    kv = _sized(expanded(config.kv_dir)) if config.kv_dir is not None and config.kv_disk else "not stored on disk"
    return [
        ("options", str(resolved.file.absolute()) if resolved.file else f"no file; {usual_file(env)} would be read"),
        ("agents", _sized(agents)),
        ("collections, files", _sized(agents.with_name(agents.name + "-collections"))),
        ("KV", kv),
        ("packed weights", _sized(packed_file.folder())),
        ("models of the hub", _sized(hub.cache_folder())),
        ("other models", _sized(registry_folder(env))),
    ]


def _sized(folder: Path) -> str:
    """Return the folder's path with the size of its files."""
    from cairn.cli.common.output import amount

    try:
        if not folder.is_dir():
            return f"{folder} (nothing yet)"
        size = sum(entry.lstat().st_size for entry in folder.rglob("*") if not entry.is_symlink() and entry.is_file())
    except OSError as error:
        return f"{folder} (cannot be read: {error.strerror or error})"
    return f"{folder} ({amount(size)})"


def _log(config: Config) -> str:
    """Return the state of the agents' token log: sound, or what of it the disk has lost."""
    from cairn.agents.log.recovery import Folder, look
    from cairn.api.data_folders import agents_folder
    from cairn.system.posix import SystemFiles

    place = agents_folder(config, os.environ)
    try:
        state = look(Folder(SystemFiles(), place)) or "sound"
    except FileNotFoundError:
        state = "none yet"
    except (OSError, CairnError) as error:
        state = f"cannot be read: {error}"
    return state


def _largest(config: Config) -> str:
    """Return the largest model that fits, by rule of thumb: weights in 70 % of the free memory."""
    from cairn.engine import machine
    from cairn.kernels.choose import REFERENCE, chosen

    try:
        bits = 32 if chosen(config.kernels) == REFERENCE else 16
    except CairnError as error:
        return f"no: {error}"
    numbers = machine.memory_available() * 0.7 / (bits // 8) / 1e9
    return f"fit up to about {numbers:.1f} billion parameters (with weights of {bits} bits)"
