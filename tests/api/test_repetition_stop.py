"""`repetition_stop` over HTTP: in whole answers, streams and agents' turns, and off by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.api.process import served
from tests.scripted_model import write_scripted

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 500, "temperature": 0}


def test_a_repeating_answer_ends_if_asked_for(tmp_path: Path) -> None:
    model = write_scripted(tmp_path / "loops.gguf", [" a", " b", " c", " d", "."], end=None)
    options = {"model": str(model), "kv_gb": 0.1, "threads": 1, "engine": "auto"}
    with served(**options) as server, httpx.Client(base_url=server.url, timeout=100) as client:
        plain = client.post("/v1/chat/completions", json=ASKED).json()
        assert plain["usage"]["completion_tokens"] == 500 and "finish_detail" not in plain["choices"][0]
        ended = client.post("/v1/chat/completions", json=ASKED | {"repetition_stop": True}).json()
        (choice,) = ended["choices"]
        assert (choice["finish_reason"], choice["finish_detail"]) == ("length", "repetition")
        assert 256 <= ended["usage"]["completion_tokens"] <= 266
        streamed = client.post("/v1/chat/completions", json=ASKED | {"repetition_stop": True, "stream": True}).text
        assert '"finish_reason":"length","finish_detail":"repetition"' in streamed
        few = {"max_tokens": 20, "logprobs": True}
        plain, watched = (
            client.post("/v1/chat/completions", json=ASKED | few | more).json()["choices"][0]
            for more in ({}, {"repetition_stop": True})
        )
        assert watched == plain and len(watched["logprobs"]["content"]) == 20, "everything else is unchanged"
        text = {"prompt": "x", "max_tokens": 500, "temperature": 0, "repetition_stop": True}
        (choice,) = client.post("/v1/completions", json=text).json()["choices"]
        assert choice["finish_detail"] == "repetition"
        client.post("/v1/agents", json={"id": "ada"}).raise_for_status()
        turn = client.post("/v1/agents/ada/turns", json=ASKED | {"repetition_stop": True}).json()
        assert turn["choices"][0]["finish_detail"] == "repetition"
        wrong = client.post("/v1/chat/completions", json=ASKED | {"repetition_stop": "yes"})
        assert wrong.status_code == 400 and "repetition_stop" in wrong.text
