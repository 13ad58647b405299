"""Time to the first token of a known context.  `python benchmarks/resume.py [--shape S] [--kernels K] ...`

A real `cairn serve` with random weights of a real shape, and one client. For each prompt length, the time to the first
token of a streamed completion:

    off             stored KV off, a new prompt
    cold            stored KV on, a new prompt; after it, a flush
    pool            the same prompt again
    after restart   the same prompt, by a server that was killed (-9) and started again: from the disk
    dropped         the same, with the files dropped from the system's page cache before
    plain read      no prompt: the bytes of one context's files, not in the page cache, read one after the other

Every answer must have status 200, with the tokens and log-probabilities of the other rows, and a cache report that
names the row's tier; anything else ends the run. The prompts are token ids, so nothing is tokenized. Off and cold take
the same prompts in alternating order, one after the other, so that both see the same machine; the figure is the median
of the pairs' ratios, with the range in which 95 % of such medians lie when the pairs are drawn again (bootstrap). With
`--kernels reference` prefill is slow, so the ratios flatter the cache; then look at the seconds from pool and disk.
`--plot FILE` draws it (needs matplotlib).

Goals: cold within 2 % of off; for 4,096 tokens, pool within 1 % of cold and after restart within 2 %; dropped within
1.5 times the plain read and one token; a stored context never slower than computing it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from cairn.kernels.choose import chosen
from cairn.models.hub.hub import demo_folder
from cairn.models.safetensors.weights import expected_tensors
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError

DEMO = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "demo": {**DEMO, "head_dim": 64, "intermediate_size": 608, "vocab_size": 2048},
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
    },
}
COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
ROWS = ("off", "cold", "pool", "after restart", "dropped", "plain read")


def write_model(folder: Path, shape: str) -> None:
    """Write random weights of the shape; the tokenizer is the demo model's, which nothing here uses."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(COMMON | SHAPES[shape]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_folder() / name, folder / name)
    rng = np.random.default_rng(1)
    tensors = {}
    for name, size in expected_tensors(load_spec(folder)).items():
        values = rng.standard_normal(size, dtype=np.float32)
        values = 1 + 0.1 * values if "norm" in name else values * (1.0 / np.sqrt(size[-1]))
        tensors[name] = values.astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors")


class Server:
    """A `cairn serve MODEL` process, with its own files below `home`."""

    def __init__(self, model: str, home: Path, *options: str, cache: Path | None = None) -> None:
        """Start the server; `cache` is where packed weights are kept, for other servers too, by default its own."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-c", "from cairn.cli import main; main()", "serve", model, *options]
        command += ["--port", self.url.rpartition(":")[2], "--log-level", "warning", "--request-timeout", "36000"]
        home = home / f"home{self.url.rpartition(':')[2]}"
        environment = {**os.environ, "XDG_DATA_HOME": str(home), "XDG_CACHE_HOME": str(cache or home)}
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, start_new_session=True, env=environment, stdout=quiet, stderr=quiet)
        try:
            self._wait()
        except BaseException:
            self.kill()  # nothing else would end it
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + 300
        while True:
            try:
                with urllib.request.urlopen(self.url + "/health/ready", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise SystemExit("the server did not become ready") from None
                time.sleep(0.1)

    def kill(self) -> None:
        """Kill the server and its worker with -9."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def open(self, path: str, body: dict[str, Any]) -> Any:
        """Send a POST and return the response; exit with the error's message."""
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            return urllib.request.urlopen(request, timeout=36_000)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{path}: {error.code} {error.read().decode(errors='replace')}") from None

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the whole answer."""
        with self.open(path, body) as answer:
            result: dict[str, Any] = json.load(answer)
            return result

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of an answer as they arrive."""
        with self.open(path, body) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise SystemExit(chunk["error"]["message"])
                    yield chunk

    def flush(self) -> dict[str, Any]:
        """Wait until everything is stored; return the disk's figures."""
        disk: dict[str, Any] = self.post("/v1/cache/flush", {})["disk"]
        return disk

    def first_token(self, model: str, prompt: list[int]) -> tuple[float, list[Any], dict[str, Any]]:
        """Return seconds to the first token, the tokens with their log-probabilities, and the cache report."""
        body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "logprobs": 0}
        tokens: list[Any] = []
        began, first, report = time.perf_counter(), 0.0, None
        for chunk in self.stream("/v1/completions", body):
            first = first or time.perf_counter() - began
            for choice in chunk["choices"]:
                # Most ids of a large random model have no text in the small tokenizer, so the log-probabilities
                # identify them.
                said = choice.get("logprobs") or {"tokens": [], "token_logprobs": []}
                tokens += zip(said["tokens"], said["token_logprobs"], strict=True)
            report = (chunk.get("usage") or {}).get("cairn", report)
        if report is None or not tokens:
            raise SystemExit("an answer without tokens or a cache report")
        return first, tokens, report


def drop_pages(folder: Path) -> None:
    """Drop the store's files from the page cache."""
    for path in folder.glob("?/*"):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def plain_read(folder: Path) -> float:
    """Return the seconds to read the store's files from the drive."""
    drop_pages(folder)
    buffer, began = bytearray(1 << 20), time.perf_counter()
    for path in sorted(folder.glob("?/*")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def check(row: str, report: dict[str, Any], length: int) -> None:
    """End the run unless the report names the tier that the row is about."""
    whole = (length - 1) // 64 * 64
    expected = {"off": report["pool"] + report["disk"] == 0, "cold": report["pool"] + report["disk"] == 0}
    expected |= {"pool": report["pool"] >= whole}
    if not expected.get(row, report["disk"] >= whole):
        raise SystemExit(f"{row}: the answer came from elsewhere: {report}")


def measure(
    folder: Path, store: Path, length: int, repeats: int, vocab: int, kernels: str
) -> tuple[dict[str, list[float]], int]:
    """Return the seconds of each row, and the bytes on disk of one context."""
    rng = random.Random(length)
    prompts = [[rng.randrange(5, vocab) for _ in range(length)] for _ in range(repeats)]
    results: dict[str, list[float]] = {row: [] for row in ROWS}
    on = ("--kernels", kernels, "--kv-dir", str(store), "--kv-load", "always")
    model, answers = folder.name, {}

    def ask(server: Server, row: str, prompt: list[int]) -> None:
        seconds, tokens, report = server.first_token(model, prompt)
        check(row, report, length)
        if answers.setdefault(tuple(prompt), tokens) != tokens:
            raise SystemExit(f"{row}: another answer than the first")
        results[row].append(seconds)
        print(f"  {length:>6} {row:14} {seconds:8.3f} s", file=sys.stderr, flush=True)

    name, home = str(folder), folder.parent
    plain = server = Server(name, home, "--kernels", kernels, "--no-kv-disk")
    try:
        server = Server(name, home, *on)
        for one in (plain, server):
            one.first_token(model, [7] * 8)
        taken = server.flush()["bytes"]
        for number in range(repeats):
            turns = [(plain, "off"), (server, "cold")]
            for one, row in turns if number % 2 else reversed(turns):
                ask(one, row, prompts[number])
            held = server.flush()["bytes"]
        for number in range(repeats):
            ask(server, "pool", prompts[number])
        plain.kill()
        for row in ("after restart", "dropped"):
            server.kill()
            if row == "dropped":
                drop_pages(store)
            server = Server(name, home, *on)
            server.first_token(model, [7] * 8)
            for number in range(repeats):
                ask(server, row, prompts[number])
        server.kill()
        results["plain read"] = [plain_read(store) / repeats]
    finally:
        plain.kill()
        server.kill()
    return results, (held - taken) // repeats


def spread(cold: list[float], off: list[float]) -> tuple[float, float, float]:
    """Return the median of the ratios of pairs, and the range of 95 % of medians when pairs are resampled."""
    ratios = [one / other for one, other in zip(cold, off, strict=True)]
    rng = random.Random(1)
    drawn = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(4000))
    return statistics.median(ratios), drawn[100], drawn[-101]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--kernels", default="auto", help="as of `cairn serve`")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=5, help="rounds, each with a prompt of its own")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    try:
        args.kernels = chosen(args.kernels)
    except ModelError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no server outlives the run
    results: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / args.shape
        write_model(folder, args.shape)
        print(
            f"{args.shape}, random weights, {args.kernels} kernels; "
            f"seconds to the first token, median of {args.repeats}"
        )
        print(f"{'tokens':>7}" + "".join(f"{row:>15}" for row in ROWS) + f"{'MB on disk':>12}  cold/off (95 %)")
        for length in args.lengths:
            store = Path(temporary) / f"kv-{length}"
            vocab = SHAPES[args.shape]["vocab_size"]
            row_seconds, taken = measure(folder, store, length, args.repeats, vocab, args.kernels)
            shutil.rmtree(store)
            row = results[length] = {name: statistics.median(seconds) for name, seconds in row_seconds.items()}
            figures = "".join(f"{row[name]:15.3f}" for name in ROWS)
            ratio, low, high = spread(row_seconds["cold"], row_seconds["off"])
            print(f"{length:>7}{figures}{taken / 1e6:12.1f}  {ratio:.3f} ({low:.3f} to {high:.3f})", flush=True)
    if args.plot:
        plot(args.plot, f"{args.shape}, random weights, {args.kernels} kernels", results)


def plot(path: Path, title: str, results: dict[int, dict[str, float]]) -> None:
    """Draw bars on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for number, row in enumerate(ROWS):
        places = [index + 0.14 * (number - 2.5) for index in range(len(results))]
        axes.bar(places, [result[row] for result in results.values()], 0.13, label=row)
    axes.set_xticks(range(len(results)), [f"{length:,} tokens" for length in results])
    axes.set_yscale("log")
    axes.set_ylabel("seconds to the first token")
    axes.set_title(title, fontsize=9)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
