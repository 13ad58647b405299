"""Requests that speculate by their own tokens have the same text, log-probabilities and ends as without."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cairn.scheduler.drafts.policy import MeasuredPolicy
from cairn.types.request import Request, SamplingParams
from tests.scheduler.test_scheduler import VOCAB, Rig


def requests(chance: random.Random) -> list[Request]:
    """Return short requests of several tenants that share beginnings, with all kinds of options."""
    beginning = chance.choices(range(VOCAB), k=20)
    made = []
    for id in range(1, 9):
        few = tuple((token, 100.0) for token in chance.sample(range(VOCAB), chance.choice((2, 4, 12))))
        sampling: dict[str, Any] = {
            "max_tokens": chance.choice((8, 30, 80)),
            "temperature": chance.choice((0.0, 0.7, 1.0)),
            "seed": chance.randrange(100),
            "logit_bias": few,
            "repetition_penalty": chance.choice((1.0, 1.0, 1.3)),
            "frequency_penalty": chance.choice((0.0, 0.0, 0.5)),
            "logprobs": chance.random() < 0.5,
            "top_logprobs": 2,
            "min_tokens": chance.choice((0, 5)),
            "stop_token_ids": (chance.randrange(VOCAB),),
        }
        prompt = (*beginning[: chance.randrange(1, 20)], *chance.choices(range(VOCAB), k=chance.randrange(20)))
        salt = chance.choice((b"one", b"two"))
        predicted = tuple(chance.choices([token for token, _ in few], k=chance.choice((0, 0, 20))))
        sampling = SamplingParams(**sampling)  # type: ignore[assignment]
        choice = chance.randrange(3)
        made.append(
            Request(id=id, prompt=prompt, sampling=sampling, salt=salt, choice=choice, prediction=predicted)  # type: ignore[arg-type]
        )
    return made


@pytest.mark.parametrize("windows", [(0,), (0, 7), (0, -1)])
@pytest.mark.parametrize("seed", range(12))
def test_guesses_change_nothing(seed: int, windows: tuple[int, ...]) -> None:
    """Alone, together, with too few blocks for all, measured or always, over windows and states too."""
    asked = requests(random.Random(seed))
    accepted = 0

    def answers(some: list[Request], policy: MeasuredPolicy | None, **limits: Any) -> dict[int, Any]:
        nonlocal accepted
        rig = Rig(drafts=policy, windows=windows, **limits)
        for request in some:
            rig.scheduler.add(request)
        rig.run()
        assert rig.nothing_held()
        accepted += rig.scheduler.stats().accepted
        assert policy is None or not policy.bytes, "an index is left"
        return {
            request.id: (
                rig.tokens(request.id),
                [logprob for output in rig.outputs[request.id] for logprob in output.logprobs],
                rig.finish(request.id),
            )
            for request in some
        }

    plain = answers(asked, None)
    assert answers(asked, MeasuredPolicy(fixed=1 + seed % 7)) == plain
    assert answers(asked, MeasuredPolicy()) == plain
    assert answers(asked, MeasuredPolicy(fixed=7), blocks=40, step_tokens=(12, 64)[seed % 2]) == plain
    for request in asked:
        assert answers([request], MeasuredPolicy(fixed=7)) == {request.id: plain[request.id]}
    assert accepted > 20, "nothing was guessed"
