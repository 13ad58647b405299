"""`--draft-model`: two real models in a worker give the answers of one, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn import LLM
from cairn.config.config import Config
from cairn.engine.needs import needs
from cairn.models.hub.hub import demo_folder
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import ModelError
from cairn.worker.draft_model import token_difference
from tests.real_models import smollm2

PROMPT = "The quick brown fox jumps over the lazy dog, and then"


def test_a_pair_gives_the_answers_of_one_in_fewer_steps() -> None:
    """The bundled model guesses for itself: its greedy answers are right, drawn ones in part."""
    found = []
    for options in ({"speculate": "off"}, {"speculate": "3", "draft_model": "demo"}):
        with LLM("demo", kv_gb=0.1, threads=1, **options) as llm:
            answers = [llm.generate(PROMPT, temperature=temp, seed=3, max_tokens=60) for temp in (0.0, 0.7)]
        found.append([one.text for one in answers])
        accepted = [one.usage.accepted_prediction_tokens for one in answers]
    assert found[0] == found[1]
    assert accepted[0] >= 30, "of a greedy answer of 60 tokens nearly all are guessed"


def test_a_model_with_other_tokens_is_refused() -> None:
    with pytest.raises(ModelError, match=r"draft_model .*: token \d+ is .* needs the tokens"):
        LLM("demo", kv_gb=0.1, draft_model=str(smollm2()))


def test_a_pool_that_is_too_small_is_refused_by_its_own_name() -> None:
    with pytest.raises(ModelError, match=r"draft_model demo: .*draft_kv_gb is 1e-06"):
        LLM("demo", kv_gb=0.1, draft_model="demo", draft_kv_gb=0.000001)


def test_a_missing_draft_model_is_reported_before_anything_is_loaded() -> None:
    with pytest.raises(ModelError, match="nowhere"):
        LLM("demo", kv_gb=0.1, draft_model="./nowhere")


def test_tokenizers_are_compared_by_their_tokens() -> None:
    one = Tokenizer.load(demo_folder())
    assert token_difference(one, Tokenizer.load(demo_folder())) == ""


def test_its_memory_counts(tmp_path: Path) -> None:
    plain, pair = Config(kv_gb=0.1), Config(kv_gb=0.1, draft_model="demo", draft_kv_gb=0.05)
    place = demo_folder()
    alone, both = needs(plain, place, 1 << 34), needs(pair, place, 1 << 34)
    assert both.held >= alone.held + alone.weights + 0.04e9
    assert needs(Config(kv_gb=0.1, draft_model="demo", speculate="off"), place, 1 << 34).held == alone.held
