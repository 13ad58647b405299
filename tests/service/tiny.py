"""A model folder for tests of the service: a byte tokenizer, a tiny config, weights that nothing reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterable, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cairn.config.config import Config
from cairn.engine.fake import FakeEngine
from cairn.engine.load_engine import load_engine
from cairn.frontend.service import Service
from cairn.types.outputs import Delta, Done, Event
from cairn.types.request import Request, SamplingParams
from cairn.types.stats import CacheReport

VOCAB = 288
CONTEXT = 2048
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def make_model(folder: Path) -> Path:
    """Write the folder's files."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROLS)
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokenizer.token_to_id("<|im_end|>")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 32,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": eos,
        "bos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    details = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(details))
    save_file({"model.norm.weight": np.ones(16, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def make_embedder(folder: Path) -> Path:
    """Write the same as an embedding model with last-token pooling."""
    make_model(folder)
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return folder


def config(folder: Path, **options: Any) -> Config:
    return Config(**{"model": str(folder), "engine": "fake", "kv_gb": 0.01, **options})


def request(service: Service, prompt: str | tuple[int, ...] = "hello", max_tokens: int = 16, **fields: Any) -> Request:
    tokens = tuple(service.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
    options = {name: fields.pop(name) for name in tuple(fields) if name in SamplingParams.__struct_fields__}
    sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "seed": 1, **options})
    return Request(id=service.next_id(), prompt=tokens, sampling=sampling, **fields)


class Answer:
    """Everything that a stream delivered."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.done: Done | None = None

    def add(self, event: Event) -> None:
        assert self.done is None, "an event after the end"
        if isinstance(event, Done):
            self.done = event
        else:
            self.deltas.append(event)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas for token in delta.tokens)

    @property
    def cache(self) -> CacheReport:
        assert self.done is not None
        return self.done.cache


async def collect(stream: AsyncIterable[Event], answer: Answer | None = None) -> Answer:
    answer = answer or Answer()
    async for event in stream:
        answer.add(event)
    return answer


def oracle(service: Service) -> Callable[[Request], list[int]]:
    """Return a function from a request to the tokens that the fake engine must give it."""
    _, engine = load_engine(service._config, Path(service._config.model))
    assert isinstance(engine, FakeEngine)
    return lambda r: engine.oracle(r.prompt, r.sampling, r.sampling.max_tokens, r.choice)


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until the condition holds; the limit is generous, because the machine may be busy."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[Service]:
    """Yield a service in this process, and close it at the end."""
    service = await Service.start(config(folder, **options), in_process=True)
    try:
        yield service
    finally:
        await service.close()
