"""Files quantized by llama.cpp, against the logits that it computes from them (tools/make_gguf_fixtures.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tools.make_gguf_fixtures import FOLDER, KINDS, LENGTHS, prompts, specs, write_fixtures

from cairn.models.gguf.reader import read_gguf
from cairn.types.model_spec import BLOCK_TOKENS
from cairn.types.request import SamplingParams
from cairn.types.step import Row
from tests.tiny_models import KERNELS, load

LARGEST = {"Q8_0": 0.13, "Q4_0": 0.13, "Q4_K_M": 0.25}
TYPICAL = {"Q8_0": 0.03, "Q4_0": 0.03, "Q4_K_M": 0.045}
"""Bounds on the root mean square of log-probability differences, where the logits' standard deviation is 1.

llama.cpp rounds activations to 8 bits before every product, and so may Cairn's kernels.
"""


def ours(path: Path, kernels: str, weights: str = "f32") -> np.ndarray:
    """Return log-probabilities [prompts, vocabulary] of the token after each prompt."""
    engine = load(path, kernels=kernels, weights=weights)
    sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=True, top_logprobs=engine.info.vocab)
    logprobs = np.full((len(LENGTHS), engine.info.vocab), np.nan)
    for at, prompt in enumerate(prompts()):
        tables = (range(-(-len(prompt) // BLOCK_TOKENS)),)
        row = Row(prompt, 0, len(prompt), tables, len(prompt) - 1, len(prompt), sampling, 0)
        (result,) = engine.prefill([row]).wait()
        assert result.logprob is not None, result.error
        for token, value in result.logprob.top:
            logprobs[at, token] = value
    engine.close()
    return logprobs


def differences(folder: Path, name: str, kernels: str, weights: str = "f32") -> tuple[float, float]:
    """Return the largest and the typical difference.

    Greedy tokens must be equal where llama.cpp's leads by more than the bound.
    """
    peer = np.load(folder / f"{name}.npy", allow_pickle=False).astype(np.float64)
    peer -= np.log(np.exp(peer).sum(axis=1, keepdims=True))
    logprobs = ours(folder / f"{name}.gguf", kernels, weights)
    best = np.sort(peer, axis=1)
    clear = best[:, -1] - best[:, -2] > LARGEST[name.partition("-")[2]]
    assert clear.sum() >= 6, "so few clear leads compare nothing"
    assert (logprobs.argmax(axis=1) == peer.argmax(axis=1))[clear].all()
    return float(np.abs(logprobs - peer).max()), float(np.sqrt(np.square(logprobs - peer).mean()))


@pytest.mark.parametrize(("kernels", "weights"), [(KERNELS[0], "f32"), *((kernel, "stored") for kernel in KERNELS)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", [spec.name for spec in specs()])
def test_logits_are_llama_cpps(
    model: str, kind: str, kernels: str, weights: str, figure: Callable[[str, str], None]
) -> None:
    """Weights as in the file, so with 8-bit activations, and dequantized."""
    largest, typical = differences(FOLDER, f"{model}-{kind}", kernels, weights)
    if kernels == KERNELS[0]:
        figure(
            f"log-probabilities beside llama.cpp, {model} {kind}, weights {weights}",
            f"rms {typical:.4f}, largest {largest:.4f}",
        )
    assert largest < LARGEST[kind]
    assert typical < TYPICAL[kind]


def test_the_files_have_the_types_they_are_here_for() -> None:
    files = {kind: read_gguf(FOLDER / f"llama-{kind}.gguf") for kind in KINDS}
    kinds = {kind: {tensor.kind.name for tensor in file.tensors.values()} for kind, file in files.items()}
    assert kinds == {"Q8_0": {"F32", "Q8_0"}, "Q4_0": {"F32", "Q4_0"}, "Q4_K_M": {"F32", "Q4_K", "Q6_K"}}


def test_a_turned_head_would_be_seen(tmp_path: Path) -> None:
    """Guards the bound itself: rows of q in another order exceed it by far."""
    name = "llama-Q8_0"
    data = bytearray((FOLDER / f"{name}.gguf").read_bytes())
    gguf = read_gguf(FOLDER / f"{name}.gguf")
    blocks = gguf.blocks("blk.0.attn_q.weight")
    at = bytes(data).index(blocks.tobytes())
    data[at : at + blocks.nbytes] = blocks[::-1].tobytes()
    (tmp_path / f"{name}.gguf").write_bytes(data)
    (tmp_path / f"{name}.npy").write_bytes((FOLDER / f"{name}.npy").read_bytes())
    logprobs = ours(tmp_path / f"{name}.gguf", KERNELS[0])
    right = ours(FOLDER / f"{name}.gguf", KERNELS[0])
    assert np.abs(logprobs - right).max() > 10 * LARGEST["Q8_0"]


def test_made_again_they_are_the_same(prove: bool, tmp_path: Path) -> None:
    """The installed llama.cpp still computes what was committed."""
    if not prove:
        pytest.skip("needs llama-cpp-python, which `make prove` installs")
    write_fixtures(tmp_path, sys.executable)
    for spec in specs():
        for kind in KINDS:
            name = f"{spec.name}-{kind}"
            new, old = np.load(tmp_path / f"{name}.npy"), np.load(FOLDER / f"{name}.npy")
            assert np.abs(new - old).max() < LARGEST[kind]
            assert differences(tmp_path, name, KERNELS[0])[0] < LARGEST[kind]
