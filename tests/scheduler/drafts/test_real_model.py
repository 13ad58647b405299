"""A real model that is asked to repeat a file: several tokens a step, the same text, and usage says so."""

from __future__ import annotations

import pytest

from cairn import LLM
from tests.real_models import smollm2

FILE = "\n".join(
    f"{name} = {value}"
    for name, value in {
        "host": "example.org",
        "port": 8080,
        "workers": 4,
        "timeout": 30,
        "retries": 5,
        "cache_size": 512,
        "log_level": "info",
        "log_file": "/var/log/app.log",
        "data_dir": "/srv/data",
        "backup_dir": "/srv/backup",
        "user": "alice",
        "group": "staff",
        "region": "north",
        "theme": "dark",
        "language": "english",
        "city": "Oslo",
    }.items()
)
MESSAGES = [{"role": "user", "content": f"Repeat this file exactly:\n\n```\n{FILE}\n```"}]


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, 0), (0.7, 1)])
def test_a_repeated_file_takes_half_the_steps(temperature: float, seed: int) -> None:
    """At least two tokens a step, greedy and drawn by a seed."""
    path, found = str(smollm2()), []
    for speculate in ("off", "auto"):
        with LLM(path, kv_gb=0.2, threads=1, speculate=speculate) as llm:
            found.append(llm.chat(MESSAGES, temperature=temperature, seed=seed, max_tokens=180))
    plain, guessing = found
    assert guessing.text == plain.text
    usage = guessing.usage
    steps = usage.completion_tokens - usage.accepted_prediction_tokens
    assert usage.completion_tokens >= 2 * steps > 0
    assert plain.usage.accepted_prediction_tokens == plain.usage.rejected_prediction_tokens == 0
