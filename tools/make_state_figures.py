"""llama.cpp's log-probabilities of tiny models that keep states: `python -m tools.make_state_figures SERVER`.

Run from the project's folder; SERVER is a llama-server. The models are those of `tests.recurrent_models`, written as
F32 GGUF in sizes that llama.cpp takes. For each it writes `NAME.npy` in `tests/models/state_figures`: float32
[prompts, vocabulary], the log-probabilities of the token after each of `prompts()`.
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
from tests.models.test_state_figures import FOLDER, MODELS, VOCAB, prompts
from tests.text.text_models import KINDS, QWEN_CONFIG, QWEN_TEMPLATE
from tests.text.text_models import write_model as write_text
from tests.tiny_models import write_model

PORT = 18_899


@contextmanager
def serving(server: str, model: Path) -> Iterator[str]:
    """A running llama-server's address."""
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
    """The log-probabilities of every token after a prompt."""
    wanted = {"prompt": prompt, "n_predict": 1, "n_probs": VOCAB, "temperature": 0, "ignore_eos": False}
    body = json.dumps(wanted | {"cache_prompt": False}).encode()
    request = urllib.request.Request(f"{address}/completion", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        (first,) = json.load(answer)["completion_probabilities"]
    found = np.full(VOCAB, np.nan, np.float32)
    for one in first["top_logprobs"]:
        found[one["id"]] = one["logprob"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", metavar="SERVER")
    server = parser.parse_args().server
    FOLDER.mkdir(exist_ok=True)
    for name, fields in MODELS.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            config: dict[str, Any] = {**QWEN_CONFIG}
            write_text(folder, KINDS["byte-level"](), config, QWEN_TEMPLATE)
            path = write_gguf(write_model(folder, **fields), Path(scratch) / "m.gguf")
            with serving(server, path) as address:
                figures = np.stack([asked(address, one) for one in prompts()])
        np.save(FOLDER / f"{name.replace(' ', '-')}.npy", figures)


if __name__ == "__main__":
    main()
