"""`--draft-model`: two real models in a worker give the answers of one, and mismatched ones are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cairn import LLM
from cairn.config.config import Config
from cairn.engine.needs import needs
from cairn.models.hub.hub import demo_folder
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import ModelError
from cairn.worker.draft_model import token_difference
from tests.mtp_models import write_with_head
from tests.real_models import smollm2
from tests.tiny_models import MODELS, write_model

DEMO_VOCAB: int = json.loads((demo_folder() / "config.json").read_text())["vocab_size"]
PROMPT = "The quick brown fox jumps over the lazy dog, and then"


def test_a_pair_gives_the_answers_of_one_in_fewer_steps() -> None:
    """The bundled model drafts for itself: its greedy drafts are right, sampled ones in part."""
    results = []
    for options in ({"speculate": "off"}, {"speculate": "3", "draft_model": "demo"}):
        with LLM("demo", kv_gb=0.1, threads=1, **options) as llm:
            answers = [llm.generate(PROMPT, temperature=temp, seed=3, max_tokens=60) for temp in (0.0, 0.7)]
        results.append([answer.text for answer in answers])
        accepted = [answer.usage.accepted_prediction_tokens for answer in answers]
    assert results[0] == results[1]
    assert accepted[0] >= 30, "of a greedy answer of 60 tokens nearly all are drafted"


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


def test_a_draft_models_memory_counts(tmp_path: Path) -> None:
    plain, pair = Config(kv_gb=0.1), Config(kv_gb=0.1, draft_model="demo", draft_kv_gb=0.05)
    place = demo_folder()
    alone, both = needs(plain, place, 1 << 34), needs(pair, place, 1 << 34)
    assert both.held >= alone.held + alone.weights + 0.04e9
    assert needs(Config(kv_gb=0.1, draft_model="demo", speculate="off"), place, 1 << 34).held == alone.held


def test_a_model_with_recurrent_states_is_refused(tmp_path: Path) -> None:
    """Rejected drafts would change its states."""
    folder = with_demo_tokens(write_model(tmp_path, **MODELS["qwen 3.5"], vocab_size=DEMO_VOCAB))
    with pytest.raises(ModelError, match=r"draft_model .*: guesses would change its recurrent states; take a model"):
        LLM("demo", kv_gb=0.1, threads=1, draft_model=str(folder))


@pytest.mark.parametrize("name", ["glm 4.5", "qwen 3.5"])
def test_a_models_own_head_guesses_without_being_asked_for(name: str, tmp_path: Path) -> None:
    """The text is the same, and usage counts the head's drafts.

    A draft model takes the head's place.
    """
    folder = with_demo_tokens(write_with_head(tmp_path / "model", name, vocab_size=DEMO_VOCAB))
    found, accepted = [], []
    for options in ({"speculate": "off"}, {"speculate": "3"}, {"speculate": "3", "draft_model": "demo"}):
        with LLM(str(folder), kv_gb=0.05, threads=1, **options) as llm:
            answers = [llm.generate(PROMPT, temperature=temp, seed=3, max_tokens=60) for temp in (0.0, 0.7)]
        found.append([answer.text for answer in answers])
        accepted.append(sum(answer.usage.accepted_prediction_tokens for answer in answers))
    assert found[0] == found[1] == found[2]
    assert accepted[0] == 0 and accepted[1] >= 10, "of 120 tokens"


def test_on_a_device_without_exact_bits_only_a_number_turns_drafts_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `auto` there are no drafts there, and the log says so.

    A number turns them on, and the log says what is lost.
    """
    folder = with_demo_tokens(write_with_head(tmp_path / "model", "glm 4.5", vocab_size=DEMO_VOCAB))
    caplog.set_level("INFO")
    guessed, logs = [], []
    for speculate in ("auto", "3"):
        caplog.clear()
        with LLM(str(folder), kv_gb=0.05, threads=1, device="torch-cpu", speculate=speculate) as llm:
            usage = llm.generate(PROMPT, temperature=0.0, max_tokens=60).usage
        guessed.append(usage.accepted_prediction_tokens + usage.rejected_prediction_tokens)
        logs.append(caplog.text)
    assert guessed[0] == 0 < guessed[1]
    assert "guessed tokens are off: on torch-cpu" in logs[0]
    assert "guessed tokens are on, and on torch-cpu" in logs[1]


def with_demo_tokens(folder: Path) -> Path:
    """Return the folder, with the bundled model's tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_folder() / name, folder / name)
    return folder
