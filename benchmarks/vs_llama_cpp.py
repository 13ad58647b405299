"""Cairn beside llama.cpp on the same GGUF file.  `python benchmarks/vs_llama_cpp.py [--shape S] [--type bf16|f16]`

Random weights of a real shape are written once as a GGUF file without a tokenizer; both systems read that file. Each
round measures one, then the other, in processes of their own, with the same threads; the table has medians over the
rounds and Cairn's speed divided by llama.cpp's. Prefill is one prompt of `--prompt` tokens with the logits of its last;
decode is one sequence, greedy, one step a token, as each system steps: Cairn's engine with its sampling, llama.cpp's
`llama_decode` with the argmax of its logits. llama.cpp keeps KV in f16, Cairn in f32.

llama.cpp comes with the extra `bench` and is to be built for this machine, which takes minutes:
`CMAKE_ARGS=-DGGML_NATIVE=ON pip install -e '.[bench]' --no-binary llama-cpp-python`.
`--llama-python` names another interpreter that has it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PEER = """
import ctypes, json, statistics, sys, time
import numpy as np
import llama_cpp as c

path, threads, prompt, decode = sys.argv[1], *map(int, sys.argv[2:5])
c.llama_backend_init()
model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
assert model, "llama.cpp cannot load the file"
params = c.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_ubatch = max(prompt, decode) + 64, max(prompt, 512), 512
params.n_threads = params.n_threads_batch = threads
context = c.llama_init_from_model(model, params)
assert context, "llama.cpp makes no context"
vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))

def step(tokens):
    array = (c.llama_token * len(tokens))(*tokens)
    assert c.llama_decode(context, c.llama_batch_get_one(array, len(tokens))) == 0, "llama_decode failed"
    logits = np.ctypeslib.as_array(c.llama_get_logits_ith(context, -1), shape=(vocab,))
    return int(logits.argmax())

def clear():
    c.llama_memory_clear(c.llama_get_memory(context), True)

tokens = [7919 * (at + 1) % vocab for at in range(prompt)]
times = []
for _ in range(4):
    clear()
    start = time.perf_counter()
    step(tokens)
    times.append(time.perf_counter() - start)
clear()
token, steps = step(tokens[:1]), []
for _ in range(decode):
    start = time.perf_counter()
    token = step([token])
    steps.append(time.perf_counter() - start)
print(json.dumps({"prefill": prompt / statistics.median(times[1:]), "decode": 1 / statistics.median(steps)}))
"""


def write_file(path: Path, shape: str, kind: str) -> None:
    """The shape with random weights; matrices in `kind`, norms in float32, no tokenizer."""
    import gguf
    import numpy as np

    from cairn.models.gguf_weights import hub_name
    from cairn.models.shapes import RandomWeights, shape_spec

    spec = shape_spec(shape)
    arch = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}[spec.architecture]
    weights = RandomWeights(spec, kind)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_vocab_size(spec.vocab)
    writer.add_tokenizer_model("none")
    names = ["token_embd.weight", "output_norm.weight"]
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm", "ffn_norm")
    for layer in range(spec.layers):
        names += [f"blk.{layer}.{part}.weight" for part in (*parts, "ffn_gate", "ffn_up", "ffn_down")]
    raw = {"bf16": gguf.GGMLQuantizationType.BF16, "f16": gguf.GGMLQuantizationType.F16}[kind]
    for name in names:
        known = hub_name(name)
        if known not in weights:
            continue
        array = weights[known]
        if array.dtype == np.float32:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, array.view(np.uint8 if kind == "bf16" else np.float16), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ours(path: Path, threads: int, prompt: int, decode: int) -> dict[str, float]:
    """Both speeds of `cairn bench`, which says them of the same file."""
    command = [sys.executable, "-c", "from cairn.cli import main; main()", "bench", str(path), "--threads"]
    command += [str(threads), "--prompt", str(prompt), "--decode", str(decode), "--batch", "1", "--json"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)
    return {one["work"]: one["tokens_per_second"] for one in found["figures"]}


def theirs(python: str, path: Path, threads: int, prompt: int, decode: int) -> dict[str, float]:
    command = [python, "-c", PEER, str(path), str(threads), str(prompt), str(decode)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"llama.cpp failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-0.6b", choices=("qwen3-0.6b", "llama-3.2-1b", "demo"))
    parser.add_argument("--type", default="bf16", choices=("bf16", "f16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-python", default=sys.executable, metavar="FILE")
    given = parser.parse_args()
    seen: dict[str, list[dict[str, float]]] = {"cairn": [], "llama.cpp": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{given.shape}-{given.type}.gguf"
        write_file(path, given.shape, given.type)
        for number in range(given.rounds):
            start = time.monotonic()
            seen["cairn"].append(ours(path, given.threads, given.prompt, given.decode))
            seen["llama.cpp"].append(theirs(given.llama_python, path, given.threads, given.prompt, given.decode))
            print(f"round {number + 1}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(f"{given.shape}, {given.type}, {given.threads} threads, medians of {given.rounds} rounds, tok/s")
    print(f"{'':16}{'cairn':>10}{'llama.cpp':>12}{'ratio':>8}   (each round)")
    for work in ("prefill", "decode"):
        each = {name: [one[work] for one in rounds] for name, rounds in seen.items()}
        mine, peer = (statistics.median(each[name]) for name in ("cairn", "llama.cpp"))
        rounds = "; ".join(f"{a:.1f} / {b:.1f}" for a, b in zip(each["cairn"], each["llama.cpp"], strict=True))
        label = f"{work} {given.prompt}" if work == "prefill" else "decode, batch 1"
        print(f"{label:16}{mine:10.1f}{peer:12.1f}{mine / peer:8.2f}   {rounds}")


if __name__ == "__main__":
    main()
