"""Hidden states of decoders equal transformers', in any batch and chunking, and from cached blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from cairn.engine.fake import FakeEngine, fake_spec
from cairn.types.step import Row
from tests.tiny_models import GREEDY, KERNELS, MODELS, Driver, load, prompt, write_model


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["qwen 3 with window layers", "gemma 3", "llama with biases, tied"])
def test_the_last_state_is_that_of_transformers(
    name: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, **MODELS[name])
    engine = load(folder, kernels=kernels)
    driver = Driver(engine, monkeypatch)
    rows, states = [], []
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model.eval()
    for length in (1, 20, 70):
        tokens = prompt(length, engine.info.vocab, seed=length)
        tables = driver.tables(length)
        rows.append(Row(tokens, 0, length, tables, length - 1, length, GREEDY, 0, want="hidden"))
        with torch.no_grad():
            states.append(model(torch.tensor([tokens])).last_hidden_state[0, -1].numpy())
    said = Row([3, 4], 0, 2, driver.tables(2), 1, 2, GREEDY, 0)
    together = driver.step([rows[0], said, *rows[1:]])
    assert together[1].token is not None and not together[1].hidden
    found = [one.hidden for one in (together[0], *together[2:])]
    for got, want in zip(found, states, strict=True):
        np.testing.assert_allclose(np.frombuffer(got, np.float32), want, rtol=0, atol=1e-4)
    alone = [engine.embed([row]).wait()[0].hidden for row in rows]
    assert alone == found
    long = rows[2]
    half = Row(long.tokens, 0, 33, long.tables, None, 70, GREEDY, 0, want="hidden")
    assert not engine.embed([half]).wait()[0].hidden
    rest = Row(long.tokens, 33, 70, long.tables, 69, 70, GREEDY, 0, want="hidden")
    assert engine.embed([rest]).wait()[0].hidden == found[2]
    engine.close()


def test_the_fake_engines_state_shows_every_mistake() -> None:
    engine = FakeEngine(fake_spec(windows=(0, 24)), blocks=64)
    tokens = list(range(40))
    tables = ([3, 1, 7], [5, 2, 9])
    row = Row(tokens, 0, 40, tables, 39, 40, GREEDY, 0, want="hidden")
    (result,) = engine.embed([row]).wait()
    assert result.hidden == engine.oracle_vector(tokens) != engine.oracle_vector([*tokens[:-1], 7])
    engine.write_blocks(0, [1], engine.read_blocks(0, [3]).wait()).wait()
    last = Row(tokens, 39, 40, tables, 39, 40, GREEDY, 0, want="hidden")
    assert engine.embed([last]).wait()[0].hidden != result.hidden
