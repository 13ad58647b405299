"""The memory plan: the size of KV pools beside the weights, and refusals with figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from cairn.config.config import Config
from cairn.engine import memory
from cairn.engine.memory import (
    WeightMemory,
    block_bytes,
    check_memory,
    kv_dtype,
    pool_blocks,
    running_rows,
    weight_bytes,
    weight_memory,
)
from cairn.engine.recorded import RecordedEngine
from cairn.kernels.choose import load_kernels
from cairn.kernels.quantized import Segments
from cairn.kv.pool.cache import longest
from cairn.models.forward.decoder import build
from cairn.models.packing.weight_format import HeldWeights, form_of
from cairn.models.safetensors.weights import open_weights, parameters
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError
from cairn.types.model_spec import BLOCK_TOKENS, CacheGroup, ModelSpec
from tests.gguf_files import write_gguf
from tests.tiny_models import BFLOAT16, KERNELS, MODELS, random_tensors, write_config, write_model


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    """Return one full group of two layers: 8 KiB a block and layer pair, with 2 heads of 16."""
    return load_spec(write_config(tmp_path))


def pool_bytes(spec: ModelSpec, blocks: tuple[int, ...]) -> int:
    return sum(count * size for count, size in zip(blocks, block_bytes(spec, "float32"), strict=True))


def test_the_default_is_a_quarter_of_what_is_free_beside_the_weights(spec: ModelSpec) -> None:
    config = Config(max_running=4096, step_tokens=16)
    free = 400_000_000
    got = pool_bytes(spec, pool_blocks(spec, config, free))
    assert 0.2 * free < got <= (free - weight_bytes(spec)) / 4
    check_memory(spec, config, pool_blocks(spec, config, free), free)


def test_the_default_is_at_most_what_all_running_contexts_need(spec: ModelSpec) -> None:
    config = Config(max_running=3)
    assert pool_blocks(spec, config, 1 << 40) == (3 * (512 // 16 + 1),)
    assert pool_blocks(spec, Config(max_running=3, context=64), 1 << 40) == (max(3 * (64 // 16 + 1), 5),)


def test_a_given_size_is_kept(spec: ModelSpec) -> None:
    size = block_bytes(spec, "float32")[0]
    assert size == 2 * 16 * 2 * 2 * 16 * 4
    assert pool_blocks(spec, Config(kv_gb=0.01), 0) == (int(0.01 * 10**9) // size,)


@pytest.fixture
def hybrid(tmp_path: Path) -> ModelSpec:
    """Return a full group of one layer, and a state group of three."""
    return load_spec(write_config(tmp_path / "hybrid", **MODELS["qwen 3.5"]))


def test_states_take_no_more_than_half(hybrid: ModelSpec) -> None:
    kv, size = block_bytes(hybrid, "float32")
    assert size == 3 * 4 * hybrid.groups[1].numbers
    for budget in (0.001, 0.002, 0.004):
        config = Config(kv_gb=budget, max_running=256)
        full, states = pool_blocks(hybrid, config, 0)
        assert 0.45 * budget * 1e9 < states * size <= budget * 1e9 / 2
        assert 0.98 * budget * 1e9 < pool_bytes(hybrid, (full, states)) <= budget * 1e9
        # Each running request needs two; two are left for contexts to come back to.
        assert running_rows(hybrid, config, (full, states)) == (states - 2) // 2 < 256
    config = Config(kv_gb=0.5, max_running=8)
    full, states = pool_blocks(hybrid, config, 0)
    assert states - (2 * 8 + 2) == pytest.approx(full * 16 / memory.SNAPSHOT_TOKENS, rel=0.01)
    assert running_rows(hybrid, config, (full, states)) == 8
    assert 0.49e9 < full * kv + states * size <= 0.5e9


def test_one_sequence_has_its_states_whatever_they_take(hybrid: ModelSpec) -> None:
    wide = msgspec.structs.replace(hybrid.groups[1], numbers=10**7)
    spec = msgspec.structs.replace(hybrid, groups=(hybrid.groups[0], wide))
    size = 3 * 4 * 10**7
    assert pool_blocks(spec, Config(max_running=4), 1 << 30)[1] == memory.LEAST_STATES
    blocks = pool_blocks(spec, Config(kv_gb=0.6, max_running=4), 0)
    assert blocks[1] == memory.LEAST_STATES and running_rows(spec, Config(max_running=4), blocks) == 1
    with pytest.raises(ModelError, match=r"kv_gb is 0.4, but 512 tokens of context need 0\.48"):
        pool_blocks(spec, Config(kv_gb=0.4), 0)
    with pytest.raises(ModelError, match=r"0\.48 GB KV pool"):
        check_memory(spec, Config(max_running=4), pool_blocks(spec, Config(max_running=4), 0), size)


def test_kv_of_16_bits_takes_half_the_room(spec: ModelSpec) -> None:
    """The pool, the memory check and the default all follow the type (known failure 50)."""
    wide = Config(kv_gb=0.01)
    for name, dtype in (("bf16", "bfloat16"), ("f16", "float16")):
        narrow = Config(kv_gb=0.01, kv_dtype=name)
        assert kv_dtype(spec, narrow) == dtype
        assert block_bytes(spec, dtype)[0] * 2 == block_bytes(spec, "float32")[0]
        assert abs(pool_blocks(spec, narrow, 0)[0] - 2 * pool_blocks(spec, wide, 0)[0]) <= 1
        many = Config(kv_gb=0.09, kv_dtype=name, max_running=2, step_tokens=16)
        blocks = pool_blocks(spec, Config(kv_gb=0.09), 0)
        check_memory(spec, many, blocks, 60_000_000)
        with pytest.raises(ModelError, match="KV pool"):
            check_memory(spec, msgspec.structs.replace(many, kv_dtype="f32"), blocks, 60_000_000)


def test_kv_of_8_bits_takes_a_byte_a_number_and_a_scale_a_row(spec: ModelSpec) -> None:
    """Keys and values have a scale a head, latents two a token; states stay in float32."""
    wide = msgspec.structs.replace(spec, head_dim=64)
    (plain,), (small,) = block_bytes(wide, "bfloat16"), block_bytes(wide, "int8")
    assert kv_dtype(wide, Config(kv_dtype="q8")) == "int8" and small * 128 == plain * 68
    blocks = [pool_blocks(wide, Config(kv_gb=0.01, kv_dtype=name), 0)[0] for name in ("bf16", "q8")]
    assert abs(blocks[1] - blocks[0] * 128 / 68) <= 2
    groups = (
        CacheGroup(kind="full", layers=(0,), once=True, kv_heads=1, head_dim=576),
        CacheGroup(kind="state", layers=(1,), numbers=100),
    )
    latent, state = block_bytes(msgspec.structs.replace(spec, groups=groups), "int8")
    assert (latent, state) == (BLOCK_TOKENS * (576 + 8), 400)
    odd = msgspec.structs.replace(spec, head_dim=6)
    with pytest.raises(ModelError, match=r"q8 holds heads of a multiple of 4 numbers, and this model has heads of 6;"):
        kv_dtype(odd, Config(kv_dtype="q8"))
    assert kv_dtype(msgspec.structs.replace(odd, groups=groups), Config(kv_dtype="q8")) == "int8"
    with pytest.raises(ModelError, match=r"kv_dtype q8 is for device cpu; use kv_dtype auto on cuda"):
        kv_dtype(wide, Config(kv_dtype="q8", device="cuda"))


def test_a_small_model_keeps_its_kv_in_float32(spec: ModelSpec) -> None:
    large = msgspec.structs.replace(spec, vocab=1 << 20)
    assert (kv_dtype(spec, Config()), kv_dtype(large, Config())) == ("float32", "bfloat16")
    assert kv_dtype(large, Config(kv_dtype="f32")) == "float32"


def test_groups_hold_the_same_number_of_contexts(spec: ModelSpec) -> None:
    groups = (CacheGroup(kind="full", layers=(0,)), CacheGroup(kind="window", layers=(1,), window=32))
    two = msgspec.structs.replace(spec, groups=groups, context=4096)
    full, window = pool_blocks(two, Config(max_running=10, step_tokens=64), 1 << 40)
    assert (full, window) == (10 * 257, 10 * (112 // 16 + 1))
    full, window = pool_blocks(two, Config(kv_gb=0.02, step_tokens=64))
    assert abs(full / 257 - window / 8) < 0.2
    assert pool_bytes(two, (full, window)) <= 0.02 * 10**9


def test_a_window_pool_is_not_cut_below_what_the_longest_sequence_needs(tmp_path: Path) -> None:
    """Shapes of Qwen2-7B with windows in every other layer, 4.7 GB of weights and 8 GB of free memory."""
    layers = tuple(range(14))
    groups = (
        CacheGroup(kind="full", layers=layers),
        CacheGroup(kind="window", layers=tuple(layer + 14 for layer in layers), window=4096),
    )
    sizes = {"layers": 28, "hidden": 3584, "heads": 28, "kv_heads": 4, "head_dim": 128, "ffn": 18944}
    small = load_spec(write_config(tmp_path, "Qwen2ForCausalLM"))
    spec = msgspec.structs.replace(small, **sizes, vocab=152_064, context=131_072, groups=groups)
    weights = WeightMemory(4_700_000_000, 0)
    blocks = pool_blocks(spec, Config(), 8 * 10**9, weights)
    window = -(-(4096 + Config().step_tokens + 16) // 16) + 1
    assert blocks[1] == window and longest(groups, blocks, 16) > 16_000
    for gb in (0.04, 0.05, 0.1, 0.2, 0.5, 1, 2, 3.6, 3.7, 3.8, 3.9, 4, 5, 9):
        full, window_blocks = found = pool_blocks(spec, Config(kv_gb=gb))
        assert pool_bytes(spec, found) // 2 <= gb * 10**9
        assert window_blocks >= min(full, window), "the window pool decides what the longest sequence is"
        if gb < 3:
            assert window_blocks <= window, "nor do windows take what the full layers need"
            assert sum(found) * 16 > gb * 10**9 / (14 * 2 * 4 * 128 * 2) - 64, "and nothing is left over"


def test_too_little_for_one_context_is_an_error_with_figures(spec: ModelSpec) -> None:
    with pytest.raises(ModelError, match=r"kv_gb is 1e-05, but 512 tokens of context need 0\.00\d+ GB") as caught:
        pool_blocks(spec, Config(kv_gb=1e-5))
    assert caught.value.exit_code == 2


def test_only_the_reference_kernels_hold_the_scores_of_a_whole_context(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with a context of a million tokens must fit where its weights and one shorter context do."""
    sizes = {"layers": 28, "hidden": 3584, "heads": 28, "kv_heads": 4, "head_dim": 128, "ffn": 18944}
    groups = (CacheGroup(kind="full", layers=tuple(range(28))),)
    large = msgspec.structs.replace(spec, **sizes, vocab=152_064, context=1_010_000, groups=groups)
    many = msgspec.structs.replace(spec, heads=64, context=200_000)
    config, free, weights = Config(), 7_300_000_000, WeightMemory(4_700_000_000, 0)
    monkeypatch.setattr(memory, "kernels_of", lambda config: "avx2")
    assert memory._buffers(many, config) < 20e6
    blocks = pool_blocks(large, config, free, weights)
    assert 16 * blocks[0] > 4 * memory.LEAST_CONTEXT
    check_memory(large, config, blocks, free, weights)
    monkeypatch.setattr(memory, "kernels_of", lambda config: "reference")
    assert memory._buffers(many, config) > 4 * 3 * 64 * 200_000 * 8
    with pytest.raises(ModelError, match="buffers"):
        check_memory(large, config, pool_blocks(large, config, free, weights), free, weights)


def test_a_model_that_does_not_fit_is_an_error_with_figures(spec: ModelSpec) -> None:
    def fits(free: int, **options: Any) -> bool:
        config = Config(max_running=2, step_tokens=16, **options)
        try:
            check_memory(spec, config, pool_blocks(spec, config, free), free)
        except ModelError as error:
            assert all(word in str(error) for word in ("weights", "KV pool", "buffers", "are free"))
            return False
        return True

    assert fits(10_000_000) and not fits(100_000)
    assert fits(100_000_000, kv_gb=0.09) and not fits(100_000_000, kv_gb=0.101)


def test_weights_are_counted_as_they_are_held(tmp_path: Path) -> None:
    folder = write_config(tmp_path, tie_word_embeddings=True)
    spec, tensors = load_spec(folder), random_tensors(folder)
    assert weight_bytes(spec) == 4 * sum(tensor.size for tensor in tensors.values())


def held_bytes(made: Any) -> int:
    if isinstance(made, Segments):
        return sum(part.panels.nbytes for _, part in made.parts)
    return getattr(getattr(made, "array", made), "nbytes", 0)


class Counting:
    """Kernels that add up the bytes they are given to hold."""

    def __init__(self, kernels: Any) -> None:
        self.kernels, self.bytes = kernels, 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            made = getattr(self.kernels, name)(*arguments)
            self.bytes += held_bytes(made)
            return made

        return call


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_weights_are_counted_as_the_kernels_hold_them(kernels: str, dtype: Any, tmp_path: Path) -> None:
    """Otherwise a model that fits would be refused: kernels may keep 16-bit weights in 16 bits."""
    folder = write_model(tmp_path, dtype=dtype, vocab_size=4096, hidden_size=96, tie_word_embeddings=True)
    spec = load_spec(folder)
    weights = open_weights(folder, spec)
    taken = weight_memory(spec, weights, kernels)
    counting: Any = Counting(load_kernels(kernels, 1))
    build(counting, spec, weights)
    assert taken.held == pytest.approx(counting.bytes, rel=0.03)
    assert taken.passing == 0, "mapped weights need nothing beside"
    if dtype is not np.float32 and kernels != "reference":
        assert taken.held < 0.55 * weight_bytes(spec)


def test_a_matrix_that_is_made_before_it_is_packed_counts_beside_those_held_before(tmp_path: Path) -> None:
    """The largest matrix is last: only the final norm is held after it. The head comes first, beside nothing."""
    sizes: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 1, "vocab_size": 2048}
    folder = write_model(tmp_path / "model", intermediate_size=1024, **sizes)
    spec = load_spec(path := write_gguf(folder, tmp_path / "model.gguf", kind=GGMLQuantizationType.Q8_0))
    weights = open_weights(path, spec)
    assert weight_memory(spec, HeldWeights(weights, "f32"), "auto").passing == 4 * 1024 * 64 - 4 * 64
    taken = weight_memory(spec, HeldWeights(weights, "stored"), "auto")
    assert taken.passing == (1024 * 64) * 34 // 32 - 4 * 64
    folder = write_model(tmp_path / "wide", intermediate_size=64, tie_word_embeddings=True, **sizes)
    spec = load_spec(path := write_gguf(folder, tmp_path / "wide.gguf", kind=GGMLQuantizationType.Q8_0))
    taken = weight_memory(spec, HeldWeights(open_weights(path, spec), "stored"), "auto")
    made = 2048 * 64 * 34 // 32
    head = made if KERNELS[0] != "reference" else 4 * 2048 * 64
    assert taken.passing == made - (taken.held - head)


def test_packed_weights_are_counted_as_the_kernels_hold_them(tmp_path: Path) -> None:
    """Otherwise the check errs in one direction or the other: 4-bit rows take 4 bits and their scales."""
    folder = write_model(
        tmp_path / "m", hidden_size=64, intermediate_size=96, vocab_size=4096, tie_word_embeddings=True
    )
    spec = load_spec(folder)
    for kernels in KERNELS:
        for form, bits in (("int8", 8.5), ("int4", 8.5), ("bf16", 16), ("f32", 32)):
            weights = HeldWeights(open_weights(folder, spec), form_of(spec, form))
            taken = weight_memory(spec, weights, kernels)
            counting: Any = Counting(load_kernels(kernels, 1))
            build(counting, spec, weights)
            assert taken.held == pytest.approx(counting.bytes, rel=0.01), (kernels, form)
            if kernels != "reference":
                assert taken.held == pytest.approx(parameters(spec) * bits / 8, rel=0.08), (kernels, form)


def test_temporary_memory_counts_beside_the_weights_but_not_beside_an_empty_pool(spec: ModelSpec) -> None:
    config = Config(max_running=2, step_tokens=16, kv_gb=0.001)
    blocks = pool_blocks(spec, config)
    check_memory(spec, config, blocks, 100_000_000, WeightMemory(50_000_000, 50_000_000))
    with pytest.raises(ModelError, match=r"needs 0\.10 GB .*0\.05 GB weights, 0\.05 GB while loading"):
        check_memory(spec, config, blocks, 100_000_000, WeightMemory(50_000_000, 50_100_000))


_RESIDENT = """
import msgspec
from pathlib import Path
from cairn.config.config import Config
from cairn.engine.recorded import RecordedEngine
from cairn.engine.memory import weight_memory
from cairn.models.packing.random_weights import RandomWeights, shape_spec
spec = msgspec.structs.replace(shape_spec("demo"), hidden=1024, ffn=4096, heads=16, kv_heads=8, vocab=8192)
weights = RandomWeights(spec, "q8_0")
held = weight_memory(spec, weights, "auto").held
engine = RecordedEngine(spec, weights, Config(context=512, max_running=4, threads=1), (100,))
engine.close()
# Not getrusage: its peak is also that of the process that forked this one.
peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
print(held, 100 * engine.info.block_bytes[0], int(peak) * 1024)
"""


@pytest.mark.skipif(KERNELS == ["reference"] or sys.platform != "linux", reason="numpy holds weights in float32")
def test_a_process_is_no_larger_than_packed_weights_pool_and_150_mb() -> None:
    """At its peak, while loading. The same weights in float32 would be 540 MB."""
    shown = subprocess.run([sys.executable, "-c", _RESIDENT], capture_output=True, text=True, check=True).stdout
    held, pool, peak = map(int, shown.split())
    assert 130e6 < held < 150e6
    assert peak < held + pool + 150e6


def test_a_file_that_does_not_fit_is_refused_with_the_figures_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "m", hidden_size=64, intermediate_size=1024, num_hidden_layers=4)
    path = write_gguf(folder, tmp_path / "model.gguf", kind=GGMLQuantizationType.Q8_0)
    spec = load_spec(path)
    held = weight_memory(spec, HeldWeights(open_weights(path, spec), "stored"), "auto").held
    read: list[str] = []
    monkeypatch.setattr(HeldWeights, "__getitem__", lambda self, name: read.append(name))
    monkeypatch.setattr(memory, "memory_available", lambda: held // 2)
    monkeypatch.setattr(memory, "GB", 10**6)  # so that the figures of a tiny model are not all 0.00
    config = Config(weights="stored", kv_gb=1, context=64, step_tokens=16, max_running=1)
    with pytest.raises(ModelError, match=rf"{held / 1e6:.2f} GB weights.*{held / 2e6:.2f} GB are free"):
        RecordedEngine.load(spec, path, config)
    assert not read
