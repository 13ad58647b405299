"""The figures of a benchmark, under a fake clock; nothing here measures real time."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from cairn.config.config import Config
from cairn.engine.bench import Workload, open_bench
from cairn.kernels.roofline import Roofline
from cairn.models.packing.random_weights import RandomWeights, shape_spec
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.types.errors import ConfigError
from tests.tiny_models import write_model


def test_bytes_and_operations_are_those_of_the_shape(tmp_path: Path) -> None:
    spec = load_spec(write_model(tmp_path))
    ticks = count()
    load = Workload(prompt=40, decode=8, batch=(1, 3), depth=(20,))
    limits = Roofline(read=1e6, arithmetic=1e9)
    config = Config(threads=1, kernels="reference")
    bench = open_bench(spec, open_weights(tmp_path, spec), config, load, limits, lambda: float(next(ticks)))
    hidden, ffn, heads, kv, size, layers, vocab = 48, 80, 4, 2, 16, 2, 160
    matrices = layers * (hidden * size * (2 * heads + 2 * kv) + 3 * hidden * ffn)
    norms = layers * (2 * hidden + 2 * size) + hidden
    token = layers * 2 * kv * size * 4
    one, three, prompt = bench.decode(1, 20), bench.decode(3, 20), bench.prefill(20)
    bench.engine.close()
    assert (one.seconds, one.tokens_per_second, three.tokens_per_second, prompt.tokens_per_second) == (1, 1, 3, 40)
    assert one.bytes == 4 * (matrices + hidden * vocab) + 24 * token
    assert three.bytes - one.bytes == 2 * 24 * token
    assert prompt.bytes == 4 * (matrices + hidden * vocab) + 60 * token
    attention = 4 * layers * heads * size * sum(range(21, 61))
    assert prompt.operations == 2 * 40 * (matrices + norms) + 2 * hidden * vocab + attention
    assert one.read_fraction == pytest.approx(one.bytes / 1e6)
    assert prompt.arithmetic_fraction == pytest.approx(prompt.operations / 1e9)


@pytest.mark.parametrize(("kind", "most"), [("f32", 1e9), ("bf16", 2e9), ("q8_0", 4e9), ("q4_0", 4e9)])
def test_no_figure_is_beyond_a_limit(kind: str, most: float) -> None:
    """A model that fits in the caches is read faster than memory, and 8 bits are multiplied faster than float32."""
    spec = shape_spec("demo")
    held = RandomWeights(spec, kind)
    load, ticks, asked = Workload(prompt=40, decode=4, batch=(2,)), count(), list[int]()

    def cached(size: int) -> float:
        asked.append(size)
        return 2e12

    limits = Roofline(read=1.0, arithmetic=1e9, pairs=2e9, integers=4e9, cached=cached)
    config = Config(threads=1)
    bench = open_bench(spec, held, config, load, limits, lambda: float(next(ticks)))
    figures = [bench.prefill(0), bench.decode(2, 0)]
    bench.engine.close()
    assert asked == [figure.bytes for figure in figures]
    assert [figure.read_fraction for figure in figures] == [figure.bytes / 2e12 for figure in figures]
    assert [figure.arithmetic_fraction for figure in figures] == [
        min(1.0, figure.operations / most) for figure in figures
    ]
    low = open_bench(spec, held, config, load, Roofline(1.0, 1.0, 1.0), lambda: float(next(ticks)))
    step = low.decode(2, 0)
    low.engine.close()
    assert (step.read_fraction, step.arithmetic_fraction) == (1.0, 1.0)


def test_a_step_without_logits_reads_no_head_and_a_window_bounds_what_is_read(tmp_path: Path) -> None:
    spec = load_spec(write_model(tmp_path, "MistralForCausalLM", sliding_window=24, max_position_embeddings=4096))
    assert [group.window for group in spec.groups] == [24]
    config = Config(threads=1, kernels="reference")
    load, ticks = Workload(prompt=1030, decode=2, batch=(1,), depth=(0,)), count()
    bench = open_bench(spec, open_weights(tmp_path, spec), config, load, Roofline(1, 1), lambda: float(next(ticks)))
    most = bench.engine.info.max_tokens
    prompt, one = bench.prefill(0), bench.decode(1, 0)
    bench.engine.close()
    weights, token = bench.weights, sum(bench.engine.info.block_bytes) // 16
    steps = -(-1030 // most)
    assert steps > 1 and weights.head == 4 * spec.vocab * spec.hidden
    kept = [min(1030, start + most) - max(0, start - 23) for start in range(0, 1030, most)]
    assert prompt.bytes == steps * weights.streamed + weights.head + token * sum(kept)
    assert one.bytes == weights.streamed + weights.head + token * 2


def test_a_load_beyond_the_context_is_refused_with_figures(tmp_path: Path) -> None:
    spec = load_spec(write_model(tmp_path))
    load = Workload(prompt=500, depth=(20,))
    with pytest.raises(ConfigError, match=r"need 520 tokens; .* takes at most 512"):
        open_bench(spec, open_weights(tmp_path, spec), Config(), load, Roofline(1, 1), float)
