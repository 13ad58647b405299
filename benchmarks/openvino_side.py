"""OpenVINO's side of `vs_cpu_peers.py`: a process that does what lines of JSON on its standard input ask for.

It needs `optimum-intel[openvino]` and nothing of Cairn. A model with random weights of the shape that config.json
describes is exported once, with its KV as state; its weights are bfloat16, or bytes or 4 bits in groups of 32.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from both_sides import STEP, Timed, answer_lines, peak, tokens_of


class Side(Timed):
    """One compiled model and its state."""

    def load(self, folder: str, threads: int, bits: int = 16) -> dict[str, Any]:
        """Compile the model for `threads` threads; export it first where `folder` has none of so many bits."""
        import openvino

        began = time.perf_counter()
        path = Path(folder) / f"openvino-{bits}"
        if not (path / "openvino_model.xml").exists():
            with contextlib.redirect_stdout(sys.stderr):  # it shows its progress
                export(Path(folder), path, bits)
        options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "bf16"}
        compiled = openvino.Core().compile_model(path / "openvino_model.xml", "CPU", options)
        self.names = {name for one in compiled.inputs for name in one.names}
        self.request = compiled.create_infer_request()
        self.vocab = compiled.outputs[0].partial_shape[-1].get_length()
        return {"seconds": time.perf_counter() - began}

    def prefill(self, tokens: int) -> dict[str, Any]:
        """Read a prompt of `tokens` in steps of at most 512 and choose the token after it."""
        prompt = np.array([tokens_of(tokens, self.vocab, 1)], np.int64)
        self.request.reset_state()
        began = self.now()
        for start in range(0, tokens, STEP):
            logits = self.step(prompt[:, start : start + STEP], start)
        logits[0, -1].argmax()
        return {"seconds": [self.now() - began], "tokens": tokens}

    def decode(self, batch: int, steps: int) -> dict[str, Any]:
        """Do `steps` steps of `batch` sequences, each token the greedy choice of the step before."""
        self.request.reset_state()
        last = np.array([[(31 * number + 7) % self.vocab] for number in range(batch)], np.int64)
        last = self.step(last, 0)[:, -1].argmax(-1)[:, None]
        times = []
        for at in range(1, steps + 1):
            began = self.now()
            last = self.step(last, at)[:, -1].argmax(-1)[:, None]
            times.append(self.now() - began)
        return {"seconds": times, "tokens": batch}

    def step(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """Logits [sequences, tokens, vocabulary] of tokens [sequences, tokens] whose first has the position `start`."""
        batch, count = tokens.shape
        inputs = {
            "input_ids": tokens,
            "attention_mask": np.ones((batch, start + count), np.int64),
            "position_ids": np.tile(np.arange(start, start + count), (batch, 1)),
            "beam_idx": np.arange(batch, dtype=np.int32),
        }
        self.request.infer({name: value for name, value in inputs.items() if name in self.names}, share_inputs=True)
        return self.request.get_output_tensor(0).data

    def memory(self) -> dict[str, Any]:
        return {"bytes": peak()}


def export(folder: Path, into: Path, bits: int) -> None:
    """Write a model with random weights of the shape in `folder`'s config.json as OpenVINO reads it."""
    import torch
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = folder / "random"
    if not plain.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(torch.bfloat16).save_pretrained(plain)
    rounding = {
        16: None,
        8: OVWeightQuantizationConfig(bits=8),
        4: OVWeightQuantizationConfig(bits=4, sym=True, group_size=32, ratio=1.0),
    }[bits]
    options: dict[str, Any] = {"load_in_8bit": False} if rounding is None else {"quantization_config": rounding}
    OVModelForCausalLM.from_pretrained(plain, export=True, compile=False, **options).save_pretrained(into)


if __name__ == "__main__":
    # The exporter's libraries print to standard output, where only answers may stand.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer_lines(Side(), {"version": version("openvino")})
