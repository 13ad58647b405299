"""llama.cpp's side of the benchmarks: a process that does what lines of JSON on its standard input ask for.

It needs numpy and llama_cpp and nothing of Cairn, so it runs in any interpreter that has them. KV is f16, llama.cpp's
default, or q8_0 with flash attention if `load` asks for it. Each sequence has a stream of its own; a prompt is computed
in steps of at most 512 tokens.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp as c
import numpy as np

from both_sides import STEP, Timed, answer_lines, peak, tokens_of

TYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15}
"""llama_ftype."""
Q8_0 = 8
"""ggml_type of Q8_0."""
QUIET = c.llama_log_callback(lambda level, text, _: sys.stderr.write(text.decode()) if level == 4 else None)


class Side(Timed):
    """One model and the context of the row that is being measured."""

    context: Any = None
    sizes: tuple[int, int, int] | None = None

    def load(self, path: str, threads: int, kv: str = "f16") -> dict[str, Any]:
        """Load the model, with KV in f16 or q8_0."""
        began = time.perf_counter()
        self.kv = kv
        self.threads = threads
        self.model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        return {"seconds": time.perf_counter() - began, "vocab": self.vocab}

    def begin(self, batch: int, depth: int, room: int) -> dict[str, Any]:
        """Make a context of `batch` sequences of `depth` tokens with `room` for more, or keep the one that is there."""
        if self.sizes == (batch, depth, room):
            return {}
        self.end()
        params = c.llama_context_default_params()
        params.n_seq_max = batch
        params.n_ctx = batch * (-(-(depth + room) // 256) * 256)
        params.n_batch = params.n_ubatch = STEP
        params.n_threads = params.n_threads_batch = self.threads
        if self.kv == "q8_0":
            params.type_k = params.type_v = Q8_0
            params.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = c.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp makes no context")
        self.cache = c.llama_get_memory(self.context)
        self.batch, self.depth = batch, depth
        self.space = c.llama_batch_init(STEP, 0, 1)
        prompt = tokens_of(depth, self.vocab)
        for at in range(0, depth, STEP):
            self.step([(0, at + k, token) for k, token in enumerate(prompt[at : at + STEP])], last=True)
        for other in range(1, batch):
            c.llama_memory_seq_cp(self.cache, 0, other, -1, -1)
        self.sizes = (batch, depth, room)
        return {}

    def end(self) -> None:
        if self.context:
            c.llama_batch_free(self.space)
            c.llama_free(self.context)
        self.context = self.sizes = None

    def prefill(self, tokens: int) -> dict[str, Any]:
        """Compute a prompt of `tokens` behind the depth, and choose the next token."""
        self.forget()
        prompt = tokens_of(tokens, self.vocab, 1)
        began = self.now()
        for at in range(0, tokens, STEP):
            part = prompt[at : at + STEP]
            self.step([(0, self.depth + at + k, token) for k, token in enumerate(part)], last=True)
        self.chosen(1)
        return {"seconds": [self.now() - began], "tokens": tokens}

    def decode(self, steps: int) -> dict[str, Any]:
        """Run `steps` steps of all sequences, each with the greedy choice of the step before."""
        self.forget()
        last, times = [(31 * number + 7) % self.vocab for number in range(self.batch)], []
        for at in range(self.depth, self.depth + steps):
            began = self.now()
            self.step([(number, at, token) for number, token in enumerate(last)])
            last = self.chosen(self.batch)
            times.append(self.now() - began)
        return {"seconds": times, "tokens": self.batch}

    def answers(self, prompts: list[list[int]], steps: int, top: int) -> dict[str, Any]:
        """Return greedy answers, with the `top` log-probabilities of each step."""
        results = []
        for prompt in prompts:
            self.begin(1, 0, len(prompt) + steps)
            self.step([(0, at, token) for at, token in enumerate(prompt)], last=True)
            said = []
            for at in range(len(prompt), len(prompt) + steps):
                logits = self.logits(-1).astype(np.float64)
                if not np.isfinite(logits).all():
                    raise RuntimeError("llama.cpp's logits are not finite")
                logits -= logits.max() + np.log(np.exp(logits - logits.max()).sum())
                best = np.argsort(-logits)[:top]
                said.append([[int(one), float(logits[one])] for one in best])
                self.step([(0, at, int(best[0]))])
            results.append(said)
            self.end()
        return {"answers": results}

    def scores(self, prompts: list[list[int]], into: str) -> dict[str, Any]:
        """Write the logits of each prompt's last position, as float32 [prompts, vocabulary], to the file `into`."""
        results = []
        for prompt in prompts:
            self.begin(1, 0, len(prompt))
            self.step([(0, at, token) for at, token in enumerate(prompt)], last=True)
            results.append(self.logits(-1).copy())
            self.end()
        np.save(into, np.stack(results))
        return {}

    def step(self, tokens: Sequence[tuple[int, int, int]], last: bool = False) -> None:
        """Run one step over (sequence, position, token), with logits for all of them, or for the last."""
        batch = self.space
        batch.n_tokens = len(tokens)
        for at, (sequence, position, token) in enumerate(tokens):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.logits[at] = not last or at == len(tokens) - 1
        status = c.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode gave {status}")

    def chosen(self, count: int) -> list[int]:
        rows = [-1] if count == 1 else range(count)
        return [int(self.logits(row).argmax()) for row in rows]

    def logits(self, row: int) -> np.ndarray:
        return np.ctypeslib.as_array(c.llama_get_logits_ith(self.context, row), shape=(self.vocab,))

    def forget(self) -> None:
        """Cut every sequence back to the depth."""
        for number in range(self.batch):
            if not c.llama_memory_seq_rm(self.cache, number, self.depth, -1):
                raise RuntimeError("llama.cpp cannot forget a part of a sequence")

    def memory(self) -> dict[str, Any]:
        return {"bytes": peak()}

    def quantize(self, source: str, target: str, kind: str) -> dict[str, Any]:
        """Quantise a file: Q4_0 and Q8_0 for every matrix, Q4_K_M with llama.cpp's usual mixture."""
        params = c.llama_model_quantize_default_params()
        params.ftype, params.pure = TYPES[kind], kind != "Q4_K_M"
        if c.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)) != 0:
            raise RuntimeError(f"llama.cpp cannot write {kind}")
        return {}


def main() -> None:
    c.llama_log_set(QUIET, None)
    c.llama_backend_init()
    info = c.llama_print_system_info().decode().strip(" |")
    answer_lines(Side(), {"version": c.__version__, "system": info})


if __name__ == "__main__":
    main()
