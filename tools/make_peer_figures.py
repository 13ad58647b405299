"""llama.cpp's log-probabilities of a tiny model of each architecture: `python -m tools.make_peer_figures SERVER`.

Run from the project's folder; SERVER is a llama-server. Names of models after it restrict the figures to these. The
models are those of `tests.models.test_peer_figures`, written as F32 GGUF in sizes that llama.cpp accepts. For each it
writes `NAME.npy` in `tests/models/peer_figures`: float32 [prompts, vocabulary], the log-probabilities of the token
after each of `prompts()`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tests.gguf_files import write_gguf
from tests.models.test_peer_figures import FOLDER, MODELS, VOCAB, figures_of, prompts
from tests.tiny_models import write_model

PORT = 18_899
TOKENS: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": [f"t{number}" for number in range(VOCAB)],
    "tokenizer.ggml.token_type": [1] * VOCAB,
    "tokenizer.ggml.merges": ["t 1"],
}
"""A vocabulary, which llama.cpp requires in a file; prompts are sent as ids."""


@contextmanager
def serving(server: str, model: Path) -> Iterator[str]:
    """Yield the address of a running llama-server."""
    options = ["--port", str(PORT), "-t", "1", "-c", "512", "-np", "1", "--no-warmup", "-fa", "off"]
    options += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
    process = subprocess.Popen(
        [server, "-m", str(model), *options], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    address = f"http://127.0.0.1:{PORT}"
    try:
        for _ in range(120):
            time.sleep(0.5)
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=2):
                    break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit(f"{server} does not load {model}") from None
        yield address
    finally:
        process.terminate()
        process.wait()


def asked(address: str, prompt: list[int]) -> np.ndarray:
    """Return the log-probabilities of every token after a prompt."""
    wanted = {"prompt": prompt, "n_predict": 1, "n_probs": VOCAB, "temperature": 0, "ignore_eos": False}
    body = json.dumps(wanted | {"cache_prompt": False}).encode()
    request = urllib.request.Request(f"{address}/completion", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        (first,) = json.load(answer)["completion_probabilities"]
    result = np.full(VOCAB, np.nan, np.float32)
    for top_logprob in first["top_logprobs"]:
        result[top_logprob["id"]] = top_logprob["logprob"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", metavar="SERVER")
    parser.add_argument("names", metavar="NAME", nargs="*")
    asked_for = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name, fields in MODELS.items():
        if asked_for.names and name not in asked_for.names:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            path = write_gguf(write_model(folder, **fields), Path(scratch) / "m.gguf", extra=TOKENS)
            with serving(asked_for.server, path) as address:
                figures = np.stack([asked(address, prompt) for prompt in prompts()])
        np.save(figures_of(name), figures)


if __name__ == "__main__":
    main()
