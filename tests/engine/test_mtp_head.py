"""The draft head (MTP): its numbers for every file layout, and where it is not loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cairn.config.config import Config
from cairn.engine import recorded
from cairn.engine.mtp_head import fit_head, guess_note, guesses, parallel_note
from cairn.engine.needs import needs
from cairn.engine.recorded import RecordedEngine
from cairn.models.families.mtp_spec import EMBEDDING_NORM, JOIN, STATE_NORM
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.types.model_spec import BLOCK_TOKENS
from cairn.types.request import SamplingParams
from cairn.types.step import Row, RowResult
from tests.mtp_models import HEADS, head_spec, stored_layer, write_gguf_with_head, write_with_head
from tests.tiny_models import GREEDY, KERNELS, MODELS, load, prompt, write_config, write_model

ALONE: dict[str, dict[str, Any]] = {
    "qwen 3.5": {"layer_types": ["full_attention"]},
    "qwen 3.5 moe": {"full_attention_interval": 1},
    "qwen 3 next": {"full_attention_interval": 1},
    "glm 4.5": {"first_k_dense_replace": 0},
    "deepseek 3": {"first_k_dense_replace": 0},
    "glm 4.7 flash": {"mlp_layer_types": ["sparse"]},
}
"""Changes to the config that make the head's layer the only one of a model."""
SCORED = SamplingParams(max_tokens=9, temperature=0.0, logprobs=True, top_logprobs=160)


def states(count: int, hidden: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, hidden)).astype(np.float32)


def run(engine: RecordedEngine, tokens: list[int], before: np.ndarray, cuts: list[int]) -> RowResult:
    """Run a sequence in pieces; return the result after its last token."""
    table, result, start = list(range(9)), RowResult(), 0
    for end in (*cuts, len(tokens)):
        last = end - 1 if end == len(tokens) else None
        part = before[start:end].tobytes()
        row = Row(tokens, start, end, (table,), last, 1, SCORED, 0, states_from=end - 1, before=part)
        (result,) = engine.prefill([row]).wait()
        start = end
    return result


def scores(result: RowResult) -> np.ndarray:
    assert result.logprob is not None, result.error
    return np.array([value for _, value in sorted(result.logprob.top)])


def other_head(folder: Path) -> None:
    """Give the head a random matrix and norms, so that none of its parts is without effect."""
    tensors, rng = load_file(folder / "model.safetensors"), np.random.default_rng(5)
    for name, array in tensors.items():
        if name.endswith((".fc.weight", ".eh_proj.weight")):
            tensors[name] = (rng.standard_normal(array.shape) * 0.1).astype(np.float32)
        if "pre_fc_norm" in name or name.endswith((".enorm.weight", ".hnorm.weight", "mtp.norm.weight")):
            tensors[name] = (array + 0.3 * rng.standard_normal(array.shape)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")


def normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + eps) * weight


def alone(folder: Path, place: Path, name: str, inputs: np.ndarray) -> Path:
    """Write a model whose only layer is the head's, and whose token i is the i-th of these inputs."""
    spec, head = load_spec(folder), head_spec(folder)
    fields = {**HEADS[name], "num_hidden_layers": 1, "eos_token_id": None, **ALONE[name]}
    fields.pop("layer_types", None) if name != "qwen 3.5" else None
    write_config(place, **fields)
    weights = {one: np.asarray(array, np.float32) for one, array in open_weights(folder, head).items()}
    own = stored_layer(spec, {one: array for one, array in weights.items() if ".layers.0." in one}, 0)
    table = np.ones((spec.vocab, spec.hidden), np.float32)
    table[: len(inputs)] = inputs
    centred = spec.architecture.startswith("Qwen")
    files = {
        "model.embed_tokens.weight": table,
        "lm_head.weight": load_file(folder / "model.safetensors")["lm_head.weight"],
    }
    files["model.norm.weight"] = weights["model.norm.weight"]
    files |= {f"model.layers.0.{one}": array for one, array in own.items()}
    if centred:  # files hold w, `open_weights` returns 1 + w
        files = {one: array - 1 if one.endswith("norm.weight") else array for one, array in files.items()}
    save_file({one: np.ascontiguousarray(array) for one, array in files.items()}, place / "model.safetensors")
    return place


@pytest.mark.parametrize("name", HEADS)
def test_the_head_is_its_layer_over_the_joined_inputs(name: str, tmp_path: Path) -> None:
    """The reference is a model of that one layer, whose embeddings numpy makes of embeddings and states."""
    folder = write_with_head(tmp_path / "model", name)
    other_head(folder)
    engine, count = load(folder), 70
    assert engine.ahead is not None
    spec, tokens = load_spec(folder), prompt(count)
    before = states(count, spec.hidden)
    weights = open_weights(folder, head_spec(folder))
    table = np.asarray(open_weights(folder, spec)["model.embed_tokens.weight"])[tokens]
    parts = [normed(table, weights[EMBEDDING_NORM], spec.norm_eps), normed(before, weights[STATE_NORM], spec.norm_eps)]
    inputs = np.concatenate(parts, axis=1) @ np.asarray(weights[JOIN]).T
    other = load(alone(folder, tmp_path / "alone", name, inputs))
    for length in (1, 17, count):
        row = Row(list(range(length)), 0, length, (list(range(9)),), length - 1, 1, SCORED, 0, states_from=length - 1)
        (expected,) = other.prefill([row]).wait()
        result = run(engine.ahead, tokens[:length], before[:length], [])
        np.testing.assert_allclose(scores(result), scores(expected), rtol=0, atol=2e-4)
        own = [np.frombuffer(one.states, np.float32) for one in (result, expected)]
        np.testing.assert_allclose(*own, rtol=0, atol=2e-4)
    engine.close()
    other.close()


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_head_reads_in_pieces_as_at_once_and_leaves_its_model_alone(kernels: str, tmp_path: Path) -> None:
    folder = write_with_head(tmp_path, "glm 4.5")
    engine, tokens = load(folder, kernels=kernels), prompt(60)
    assert engine.ahead is not None
    before = states(60, 48)
    whole = run(engine.ahead, tokens, before, [])
    for cuts in ([1, 2, 30], [16, 32], [59]):
        assert run(engine.ahead, tokens, before, cuts) == whole
    tables = tuple(list(range(5)) for _ in engine.info.groups)
    row = Row(tokens, 0, 60, tables, 59, 60, SCORED, 0)
    (plain,) = engine.prefill([row]).wait()
    pages = [bytes(page) for page in engine.read_blocks(0, tables[0][:4]).wait()]
    run(engine.ahead, tokens, before, [])
    (again,) = engine.prefill([msgspec.structs.replace(row, states_from=0)]).wait()
    assert msgspec.structs.replace(again, states=b"") == plain
    assert [bytes(page) for page in engine.read_blocks(0, tables[0][:4]).wait()] == pages
    assert len(again.states) == 60 * 48 * 4
    engine.close()


@pytest.mark.parametrize("kernels", KERNELS)
def test_states_beside_tokens_are_those_that_embeddings_get(kernels: str, tmp_path: Path) -> None:
    """For each position of a row with guesses, in any batch; a failed row has none."""
    folder = write_with_head(tmp_path, "qwen 3.5")
    engine, tokens = load(folder, kernels=kernels), prompt(90)

    def tables(first: int) -> tuple[list[int], ...]:
        return tuple(list(range(first, first + 6)) for _ in engine.info.groups)

    row = Row(tokens, 0, 90, tables(0), 85, 90, GREEDY, 0, draft=4, states_from=3)
    beside = Row(prompt(5), 0, 5, tables(6), 4, 5, GREEDY, 0)
    result, neighbour = engine.prefill([row, beside]).wait()
    assert not neighbour.states and len(result.more) == 4
    each = np.frombuffer(result.states, np.float32).reshape(87, -1)
    for place in (3, 70, 89):
        one = Row(tokens[: place + 1], 0, place + 1, tables(12), place, 90, GREEDY, 0, want="hidden")
        (state,) = engine.embed([one]).wait()
        assert each[place - 3].tobytes() == state.hidden
    with pytest.raises(ValueError, match="wants states from 90"):
        engine.prefill([msgspec.structs.replace(row, states_from=90)])
    with pytest.raises(ValueError, match="numbers of states before them"):
        assert engine.ahead is not None
        engine.ahead.prefill([Row(tokens, 0, 5, ([0],), None, 5, GREEDY, 0, before=bytes(4 * 48 * 4))])
    engine.close()


@pytest.mark.parametrize("name", HEADS)
def test_a_gguf_file_has_the_same_head(name: str, tmp_path: Path) -> None:
    if name == "glm 4.7 flash":
        pytest.skip("no writer of its GGUF files here")
    folder = write_with_head(tmp_path / "model", name)
    path = write_gguf_with_head(folder, tmp_path / "model.gguf")
    heads = []
    for place in (folder, path):
        engine = load(place)
        assert engine.ahead is not None, engine.info.note
        heads.append(run(engine.ahead, prompt(40), states(40, 48), []))
        engine.close()
    np.testing.assert_allclose(scores(heads[0]), scores(heads[1]), rtol=0, atol=1e-4)


def test_a_head_without_a_last_norm_uses_the_models(tmp_path: Path) -> None:
    folder = write_with_head(tmp_path / "model", "qwen 3.5")
    both = [write_gguf_with_head(folder, tmp_path / f"{own}.gguf", last_norm=own) for own in (True, False)]
    norms = [open_weights(path, head_spec(path))["model.norm.weight"] for path in both]
    assert np.array_equal(*norms)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("mtp.fc.weight", (3, 3), "set aside: .*ahead.join.weight has the shape"),
        ("mtp.pre_fc_norm_hidden.weight", None, "set aside: .*ahead.state_norm.weight .* is missing"),
        ("mtp.layers.0.mlp.x.weight", (3, 3), "set aside: .*mlp.x.weight' is not part of"),
        ("mtp.fc.weight", None, "set aside: their form is not supported"),
    ],
)
def test_a_broken_head_is_set_aside_with_a_sentence(
    name: str, change: tuple[int, ...] | None, sentence: str, tmp_path: Path
) -> None:
    folder = write_with_head(tmp_path, "qwen 3.5")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    if change is not None:
        tensors[name] = np.ones(change, np.float32)
    save_file(tensors, folder / "model.safetensors")
    engine = load(folder)
    assert engine.ahead is None
    assert re.search(sentence, engine.info.note), engine.info.note
    engine.close()


def test_the_head_is_loaded_only_where_it_may_guess(tmp_path: Path) -> None:
    folder = write_with_head(tmp_path, "qwen 3.5")
    for options in ({"speculate": "off"}, {"draft_model": "demo"}):
        engine = load(folder, **options)
        assert engine.ahead is None and "MTP" not in engine.info.note
        engine.close()
    spec = load_spec(folder)
    assert "ranks (--tp) do not share it" in parallel_note(spec, folder, Config(tp=2))
    assert parallel_note(spec, folder, Config(tp=2, speculate="off")) == ""


def test_mlx_does_not_load_the_head(tmp_path: Path) -> None:
    folder = write_with_head(tmp_path, "qwen 3.5")
    fitted = fit_head(load_spec(folder), folder, Config(device="mlx-cpu", speculate="3"), "f32")
    assert isinstance(fitted, str) and "it does not run with MLX" in fitted


def test_torch_computes_the_head_too(tmp_path: Path) -> None:
    """When numbers ask for torch: the CPU kernels' numbers but for the last bits."""
    folder, results = write_with_head(tmp_path, "qwen 3.5"), []
    other_head(folder)
    for options in ({"kernels": "reference"}, {"device": "torch-cpu", "speculate": "3"}):
        engine = load(folder, **options)
        assert engine.ahead is not None, engine.info.note
        results.append(run(engine.ahead, prompt(40), states(40, 48), [20]))
        engine.close()
    np.testing.assert_allclose(scores(results[0]), scores(results[1]), rtol=0, atol=2e-4)
    engine = load(folder, device="torch-cpu")
    assert engine.ahead is None, "auto is off there"
    engine.close()


def test_a_model_that_also_sees_has_its_head_beside_its_text_part(tmp_path: Path) -> None:
    plain, nested = write_with_head(tmp_path / "plain", "qwen 3.5"), tmp_path / "nested"
    nested.mkdir()
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {}}
    outer["text_config"] = json.loads((plain / "config.json").read_text())
    (nested / "config.json").write_text(json.dumps(outer))
    own = load_file(plain / "model.safetensors")
    save_file(
        {one.replace("model.", "model.language_model.", 1) if one[:6] == "model." else one: own[one] for one in own},
        nested / "model.safetensors",
    )
    heads = []
    for folder in (plain, nested):
        engine = load(folder)
        assert engine.ahead is not None, engine.info.note
        heads.append(run(engine.ahead, prompt(40), states(40, 48), []))
        engine.close()
    assert heads[0] == heads[1]


def test_the_heads_memory_is_in_the_plan(tmp_path: Path) -> None:
    folder = write_with_head(tmp_path, "qwen 3.5")
    plans = [needs(Config(kv_gb=0.01, speculate=one), folder, 1 << 34) for one in ("off", "auto")]
    engine = load(folder)
    assert engine.ahead is not None
    pool = engine.ahead.info.blocks[0] * engine.ahead.info.block_bytes[0]
    assert engine.ahead.info.blocks[0] * BLOCK_TOKENS == 1 << 14
    assert plans[1].held - plans[0].held > pool
    engine.close()


def test_the_head_is_not_loaded_if_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_with_head(tmp_path, "qwen 3.5")
    config = Config(kv_gb=0.01, threads=1, max_running=4, step_tokens=64, speculate="off")
    least = needs(config, folder, 1 << 34).most
    monkeypatch.setattr(recorded, "device_memory", lambda config: least + (1 << 20))
    engine = RecordedEngine.load(load_spec(folder), folder, msgspec.structs.replace(config, speculate="auto"))
    assert engine.ahead is None and "set aside: there is no memory" in engine.info.note
    engine.close()


def test_auto_guesses_only_where_answers_keep_their_bits() -> None:
    cuda, cpu = {"device": "cuda"}, {"device": "cpu"}
    assert guesses(Config(**cpu)) and guesses(Config()) and not guesses(Config(speculate="off", **cpu))
    assert not guesses(Config(**cuda)) and guesses(Config(speculate="3", **cuda))
    assert (
        guess_note(Config()) == guess_note(Config(speculate="4")) == guess_note(Config(speculate="off", **cuda)) == ""
    )
    assert "guessed tokens are off: on cuda" in guess_note(Config(**cuda))
    assert "--speculate 3 turns them on" in guess_note(Config(**cuda))
    assert "may move the last bits" in guess_note(Config(speculate="5", **cuda))


def test_nemotrons_layers_are_set_aside_by_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path, **MODELS["nemotron h"])
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"mtp.layers.0.eh_proj.weight": np.ones((3, 3), np.float32)}, folder / "model.safetensors")
    engine = load(folder)
    assert engine.ahead is None and "their form is not supported" in engine.info.note
    engine.close()
