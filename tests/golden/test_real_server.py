"""One server with the bundled model, a real chat GGUF and a real embedding model, asked with openai-python.

It takes some seconds: three real models are loaded, one of them twice.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import openai

from tests.api.process import served
from tests.real_models import minilm, smollm2

LONG = "The tide comes in twice a day, and the harbour lives by it. " * 12


def test_three_models_answer_by_name_and_an_agent_outlives_its_models_absence(tmp_path: Path) -> None:
    places = ["demo", str(smollm2()), str(minilm())]
    options = {
        "engine": "cpu",
        "threads": 2,
        "kv_gb": 0.15,
        "context": 1024,
        "load_timeout": 300.0,
        "kv_load": "always",
    }
    with (
        served(models=places, kv_dir=str(tmp_path / "kv"), **options) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=300) as client,
        httpx.Client(base_url=server.url, timeout=300, trust_env=False) as http,
    ):
        names = [model.id for model in client.models.list()]
        assert len(names) == 3
        chat = next(name for name in names if "SmolLM2" in name)
        embed = next(name for name in names if "minilm" in name)
        (demo,) = set(names) - {chat, embed}

        asked = [{"role": "user", "content": "What is the capital of France? One word."}]
        said = client.chat.completions.create(model=chat, messages=asked, max_tokens=8, temperature=0)  # type: ignore[call-overload]
        assert "Paris" in said.choices[0].message.content and said.model == chat
        said = client.chat.completions.create(model=demo, messages=asked, max_tokens=4, temperature=0)  # type: ignore[call-overload]
        assert said.model == demo and said.usage.completion_tokens > 0
        made = client.embeddings.create(model=embed, input=["a cat", "a kitten", "a stock exchange"])
        cat, kitten, money = (np.array(one.embedding) for one in made.data)
        assert made.model == embed and cat @ kitten > cat @ money + 0.2
        assert client.embeddings.create(input="a cat", model=embed).data[0].embedding == made.data[0].embedding

        assert http.post("/v1/embeddings", json={"input": "a cat"}).json()["model"] == embed  # the embedder
        refused = http.post("/v1/chat/completions", json={"model": embed, "messages": asked})
        assert refused.status_code == 400 and "answers nothing" in refused.text

        assert http.post("/v1/agents", json={"id": "ada", "model": chat}).status_code == 201
        turn = {"model": chat, "messages": [{"role": "user", "content": LONG}], "max_tokens": 8, "temperature": 0}
        first = http.post("/v1/agents/ada/turns", json=turn).json()["usage"]
        assert http.post("/v1/admin/models/unload", json={"model": chat}).json()["state"] == "on disk"
        said = client.chat.completions.create(model=demo, messages=asked, max_tokens=4)  # type: ignore[call-overload]
        assert said.model == demo
        turn["messages"] = [{"role": "user", "content": "And the boats?"}]
        del turn["model"]
        again = http.post("/v1/agents/ada/turns", json=turn).json()
        cache, before = again["usage"]["cairn"], first["total_tokens"]
        assert again["model"] == chat
        assert (
            cache["disk"] >= (before - 1) // 64 * 64
            and cache["computed"] <= again["usage"]["prompt_tokens"] - cache["disk"]
        )
