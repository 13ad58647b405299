"""`cairn bench`: tokens per second of prefill and decode, compared with the machine's limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from cairn.cli.common.options import configured
from cairn.config.resolve import Resolved
from cairn.types.errors import ConfigError

if TYPE_CHECKING:
    from cairn.config.config import Config
    from cairn.engine.bench import Figure, Workload
    from cairn.kernels.roofline import Roofline
    from cairn.models.packing.random_weights import RandomWeights
    from cairn.models.packing.weight_format import HeldWeights
    from cairn.types.model_spec import ModelSpec

    Weights = HeldWeights | RandomWeights

MOST_BATCH = 256


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured figures, and the machine's limits."""

    load: Workload
    roofline: Roofline
    figures: list[Figure]
    weights: int
    """Bytes of weights in memory."""


def register(app: typer.Typer) -> None:
    """Add `cairn bench`."""

    @app.command(rich_help_panel="This machine")
    @configured(("kernels", "weights", "threads", "kv_dtype"))
    def bench(
        resolved: Resolved,
        shape: Annotated[
            str | None,
            typer.Option(metavar="NAME", help="Random weights instead of MODEL: qwen3-0.6b, llama-3.2-1b or demo."),
        ] = None,
        kind: Annotated[
            str | None,
            typer.Option("--type", metavar="TYPE", help="Type of the random weights: bf16, q4_0, q4_k_m, q8_0 ..."),
        ] = None,
        prompt: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of the prompt.")] = 512,
        decode: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to decode.")] = 128,
        batch: Annotated[str, typer.Option(metavar="N,N", help="Sequences to decode together.")] = "1,8,16",
        depth: Annotated[str, typer.Option(metavar="N,N", help="Tokens of context before them.")] = "0",
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Measure a model's speed here, against the machine's memory bandwidth and arithmetic."""
        from cairn.engine.bench import Workload

        if shape is not None and resolved.source("model") == "MODEL":
            raise ConfigError("--shape and MODEL cannot be given together")
        if shape is not None and resolved.source("weights").startswith("--"):
            raise ConfigError("--weights is for a model's own weights; for those of --shape give --type")
        if kind is not None and shape is None:
            raise ConfigError("--type is for the random weights of --shape; for a model's own give --weights")
        load = Workload(
            prompt=prompt,
            decode=decode,
            batch=_numbers("--batch", batch, 1, MOST_BATCH),
            depth=_numbers("--depth", depth, 0, 1 << 24),
        )
        spec, weights = _model(resolved.config) if shape is None else _random(shape, kind or "bf16")
        measured = _measure(spec, weights, resolved.config, load)
        _print(spec, weights, resolved.config, measured, as_json)


def _numbers(flag: str, text: str, least: int, most: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and least <= int(part[:12]) <= most for part in parts):
        raise ConfigError(f"{flag} must be whole numbers from {least} to {most}, separated by commas; found {text!r}")
    return tuple(dict.fromkeys(map(int, parts)))


def _model(config: Config) -> tuple[ModelSpec, Weights]:
    """Return a model's spec, and its weights before they are packed."""
    from cairn.models.hub import hub
    from cairn.models.packing.weight_format import HeldWeights, form_of
    from cairn.models.safetensors.weights import open_weights
    from cairn.models.spec.config import check_decodes, load_spec

    folder = hub.locate(config.model)
    spec = check_decodes(load_spec(folder, identify=False))
    return spec, HeldWeights(open_weights(folder, spec), form_of(spec, config.weights))


def _random(shape: str, kind: str) -> tuple[ModelSpec, Weights]:
    """Return a shape's spec and random weights. Raises ConfigError for an unknown shape or type."""
    from cairn.models.packing import random_weights as shapes

    if shape not in shapes.SHAPES:
        raise ConfigError(f"--shape is {shape!r:.40}, expected one of {', '.join(shapes.SHAPES)}")
    if kind not in shapes.TYPES:
        raise ConfigError(f"--type is {kind!r:.40}, expected one of {', '.join(shapes.TYPES)}")
    spec = shapes.shape_spec(shape)
    return spec, shapes.RandomWeights(spec, kind)


def _measure(spec: ModelSpec, weights: Weights, config: Config, load: Workload) -> Measured:
    from cairn.cli.common.output import talk
    from cairn.engine.bench import open_bench
    from cairn.engine.machine import cpu_count
    from cairn.kernels import roofline
    from cairn.kernels.choose import chosen
    from cairn.system.posix import SystemClock

    console, now = talk(), SystemClock().now
    console.print("measuring the machine ...")
    limits = roofline.measure(chosen(config.kernels), config.threads or cpu_count(), now)
    console.print(f"loading {spec.name} ...", markup=False)
    bench = open_bench(spec, weights, config, load, limits, now)
    try:
        figures = []
        for depth in load.depth:
            console.print(f"prefill at depth {depth} ...")
            figures.append(bench.prefill(depth))
            for batch in load.batch:
                console.print(f"decode, {batch} at once ...")
                figures.append(bench.decode(batch, depth))
    finally:
        bench.engine.close()
    return Measured(load, limits, figures, bench.weights.held)


def _print(spec: ModelSpec, weights: Weights, config: Config, measured: Measured, as_json: bool) -> None:
    import msgspec

    from cairn.cli.common.output import amount, table, talk
    from cairn.engine.machine import cpu_count, cpu_name, peak_memory
    from cairn.kernels.choose import chosen
    from cairn.models.packing.weight_format import error_line

    load, roofline, figures = measured.load, measured.roofline, measured.figures
    threads, kernels, peak = config.threads or cpu_count(), chosen(config.kernels), peak_memory()
    if as_json:
        found = {
            "model": spec.name,
            "cpu": cpu_name(),
            "kernels": kernels,
            "threads": threads,
            "weights": weights.form,
            "weight_bytes": measured.weights,
            "errors": weights.errors,
            "load": load,
            "bytes_per_second": roofline.read,
            "operations_per_second": roofline.arithmetic,
            "bfloat16_operations_per_second": roofline.pairs,
            "integer_operations_per_second": roofline.integers,
            "peak_memory_bytes": peak,
            "figures": figures,
        }
        print(msgspec.json.encode(found).decode())
        return
    talk().print(
        f"{spec.name} on {cpu_name()}, {kernels} kernels, {threads} threads: the machine reads "
        f"{roofline.read / 1e9:.1f} GB/s from memory and does {roofline.arithmetic / 1e9:.0f} GFLOP/s"
        + (f", {roofline.pairs / 1e9:.0f} in bfloat16" if roofline.pairs else "")
        + (f", {roofline.integers / 1e9:.0f} GOP/s with bytes" if roofline.integers else ""),
        markup=False,
    )
    rounding = error_line(weights.errors, len(weights)) or "nothing was rounded"
    talk().print(f"weights: {weights.form}, {amount(measured.weights)}; {rounding}", markup=False)
    rows = [
        (
            f"{one.work} {load.prompt}" if one.work == "prefill" else one.work,
            str(one.batch),
            str(one.depth),
            f"{one.tokens_per_second:.1f}",
            f"{one.bytes / 1e9:.3f}",
            f"{100 * one.read_fraction:.0f} %",
            f"{100 * one.arithmetic_fraction:.0f} %",
            f"{peak / 1e9:.2f}",
        )
        for one in figures
    ]
    table(("work", "batch", "depth", "tok/s", "GB streamed", "of bandwidth", "of arithmetic", "peak GB"), rows)
