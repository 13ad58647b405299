"""A server's last exchanges after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.api.process import served

BLOCK = 16


def test_a_first_exchange_is_there_after_a_restart(tmp_path: Path) -> None:
    """Also a short exchange that belongs to no known conversation, on a server that is stopped before it was ever
    idle.
    """
    options: dict[str, Any] = {"model": "demo", "kv_dir": str(tmp_path / "kv")}
    prompt = [3 + 7 * at % 90 for at in range(50)]
    asked = {"prompt": prompt, "n_predict": 190, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    with served(**options) as server:
        first = server.post("/completion", asked)
        assert first["cairn"]["computed"] == len(prompt) and len(first["tokens"]) == 190
        twice = server.post("/completion", asked | {"prompt": prompt[:9]})
        assert twice["timings"]["cache_n"] == 8, "of a part of a block, too, but for the last token"
        server.signal()
        assert server.wait() == 0
    with served(**options) as server:
        new = [5, 6, 7]
        longer = [*prompt, *first["tokens"], *new]
        report = server.post("/completion", asked | {"prompt": longer})["cairn"]
        assert report["disk"] + report["computed"] == len(longer)
        assert report["computed"] <= len(new) + BLOCK, report
    with served(**options) as server:
        again = server.post("/completion", asked)
        assert again["tokens"] == first["tokens"] and again["timings"]["cache_n"] == len(prompt) - 1
