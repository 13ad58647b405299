"""A real model that is asked to repeat a file: several tokens a step, the same text, and usage reports it."""

from __future__ import annotations

import pytest

from cairn import LLM
from tests.real_models import smollm2

NAMES = (
    "host port workers timeout retries cache_size log_level log_file data_dir backup_dir user group region zone mode "
    "theme language currency country city"
)
VALUES = (
    "example.org 8080 4 30 5 512 info /var/log/app.log /srv/data /srv/backup alice staff north 3 safe dark english "
    "euro Norway Oslo"
)
FILE = "\n".join(f"{name} = {value}" for name, value in zip(NAMES.split(), VALUES.split(), strict=True))


@pytest.mark.parametrize(
    ("temperature", "seed", "asked"),
    [
        (0.0, 0, "Repeat this file exactly:\n\n```\n{}\n```"),
        (0.7, 3, "Copy the following file without any change.\n\n{}"),
    ],
)
def test_a_repeated_file_takes_half_the_steps(temperature: float, seed: int, asked: str) -> None:
    """At least two tokens a step if guesses are always offered; as many as pay if that is measured."""
    path, outcomes = str(smollm2()), {}
    messages = [{"role": "user", "content": asked.format(FILE)}]
    for speculate in ("off", "auto", "7"):
        with LLM(path, kv_gb=0.2, threads=1, speculate=speculate) as llm:
            outcomes[speculate] = llm.chat(messages, temperature=temperature, seed=seed, max_tokens=250)
    assert outcomes["off"].text == outcomes["auto"].text == outcomes["7"].text
    usage = outcomes["7"].usage
    steps = usage.completion_tokens - usage.accepted_prediction_tokens
    assert usage.completion_tokens >= 2 * steps > 0, f"{steps} steps for {usage.completion_tokens} tokens"
    assert outcomes["auto"].usage.accepted_prediction_tokens > 0
    none = outcomes["off"].usage
    assert none.accepted_prediction_tokens == none.rejected_prediction_tokens == 0
