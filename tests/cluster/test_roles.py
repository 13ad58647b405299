"""A prefill server, a decode server and a router give one server's tokens, even if the first dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: nothing can be sealed")

from cairn.config.config import Config
from cairn.types.errors import ConfigError
from tests.api.process import Served
from tests.cluster.machines import Cluster, cluster


def chat(number: int) -> dict[str, Any]:
    """Return a chat whose prompt has some twelve hundred tokens."""
    messages = [{"role": "user", "content": f"Story {number}. " + "Once upon a time there was a stone. " * 110}]
    return {"messages": messages, "temperature": 0, "max_tokens": 24, "ignore_eos": True}


def answer(made: Cluster | Served, number: int) -> tuple[str, dict[str, Any]]:
    path = "/v1/chat/completions"
    response = made.post(path, chat(number)) if isinstance(made, Served) else made.call("POST", path, chat(number))
    return response["choices"][0]["message"]["content"], response["usage"]["cairn"]


def test_another_server_computes_the_prompt(tmp_path: Path) -> None:
    alone = Served()
    with cluster(
        tmp_path, 2, roles=["prefill", "decode"], routed=["--apart", "always"], kv_load="always", context=2048
    ) as made:
        alone.wait_ready()
        for number in range(2):
            text, usage = answer(made, number)
            assert text == answer(alone, number)[0]
            assert usage["shared"] >= 1024 and usage["computed"] <= 80, usage
        listed = made.call("GET", "/router/replicas")["data"]
        assert [replica["role"] for replica in listed] == ["prefill", "decode"]
        held = threading.Thread(target=lambda: (time.sleep(0.05), made.kill(0)))
        held.start()
        assert answer(made, 2)[0] == answer(alone, 2)[0], "while it dies"
        held.join()
        text, usage = answer(made, 3)
        assert text == answer(alone, 3)[0] and usage["shared"] == 0, "after it died"
    alone.end()


def test_the_gate_of_a_real_model_says_what_it_measured(
    tmp_path: Path, figure: Callable[[str, str], None], prove: bool
) -> None:
    """The figures of docs/cluster.md: how fast two servers of this machine compute and load, and the decision."""
    if not prove:
        pytest.skip("only with --prove")
    options: dict[str, Any] = {"engine": "auto", "model": "demo", "kv_load": "always", "threads": 1}
    with cluster(tmp_path, 2, roles=["prefill", "decode"], routed=["--apart", "always"], **options) as made:
        apart = []
        for number in range(6):
            began = time.monotonic()
            _, usage = answer(made, number)
            apart.append(time.monotonic() - began)
            assert usage["shared"] >= 512
        said = made.call("GET", "/health/role", port=made.ports[1])
        direct = []
        for number in range(10, 16):
            began = time.monotonic()
            made.call("POST", "/v1/chat/completions", chat(number), port=made.ports[1])
            direct.append(time.monotonic() - began)
        computes = made.call("GET", "/health/role", port=made.ports[1])["computes"]
    figure("prompt tokens a second: computed, loaded from the shared store", f"{computes:,.0f}, {said['loads']:,.0f}")
    figure(
        "a chat of some 1,200 tokens: apart, direct (median)", f"{sorted(apart)[3]:.2f} s, {sorted(direct)[3]:.2f} s"
    )


def test_a_role_wants_a_shared_store() -> None:
    from cairn.cluster.shared import open_shared
    from cairn.system.posix import SystemClock, SystemFiles, SystemRng

    with pytest.raises(ConfigError, match="role prefill needs shared_store"):
        open_shared(Config(role="prefill"), SystemClock(), SystemFiles(), SystemRng())
