"""The check of how much a codec changes a model's answers, and the file that remembers its result."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest

from cairn.engine.fake import STATE, FakeEngine, fake_spec
from cairn.kv.disk.codec import Q8, Raw, open_codec, state_groups
from cairn.kv.disk.codec_comparison import Comparison, compare, recall, remember
from cairn.types.errors import ModelError
from cairn.types.request import SamplingParams
from cairn.types.step import Row
from tests.files import Crash, CrashFiles, Fault
from tests.kv.stored import FOLDER, Time, open_store
from tests.laws import codecs
from tests.tiny_models import MODELS, load, prompt, write_model

FOUND = Comparison("q8", 2000, 1990, 8.0, 8.04, 0.001, 0.02)


@pytest.mark.parametrize("seed", [0, 5, 7])
def test_the_report_matches_an_independent_reading(seed: int) -> None:
    codecs.run(seed)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen 3, head size of its own", "f32"),
        ("qwen 3 with window layers", "bf16"),
        ("mistral", "f32"),
        ("mistral", "f16"),
    ],
)
def test_the_check_feeds_tokens_as_a_prompt(name: str, dtype: str, tmp_path: Path) -> None:
    engine = load(write_model(tmp_path, **MODELS[name]), kv_gb=0.02, kv_dtype=dtype)
    try:
        tokens, info = prompt(200), engine.info
        head_dim = {"qwen 3, head size of its own": 20, "qwen 3 with window layers": 16, "mistral": 12}[name]
        tables = tuple(list(range(13)) for _ in info.groups)
        scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=True, top_logprobs=1)
        (whole,) = engine.prefill([Row(tokens, 0, 199, tables, 0, 200, scored, 0)]).wait()
        perplexity = math.exp(-math.fsum(score.logprob for score in whole.prompt_logprobs) / 199)
        plain = compare(engine, Raw(info.block_bytes), tokens)
        assert plain == Comparison("raw", 199, 199, perplexity, perplexity, 0.0, 0.0)
        assert plain.agreement == 1 and plain.difference == 0
        coded = compare(engine, open_codec("q8", info.block_bytes, head_dim, info.kv_dtype), tokens)
        assert coded.raw_perplexity == perplexity
        assert coded.agreed > 170 and 0 < abs(coded.difference) < 0.05
    finally:
        engine.close()


def test_kv_that_8_bits_cannot_hold_is_a_short_error() -> None:
    engine = codecs.TinyEngine(1, 128, 64)
    codec = Q8(engine.info.block_bytes, codecs.WIDTH)
    engine._model.embed[0, 7] = np.inf
    with np.errstate(all="ignore"), pytest.raises(ModelError, match="cannot read the text with raw"):
        compare(engine, codec, [7] * 100)
    engine._model.embed[0, 7] = 1
    with pytest.raises(ModelError, match="q8 cannot hold this model's KV: too large"):
        compare(engine, _Refusing(engine.info.block_bytes, codecs.WIDTH), [7] * 100)
    with pytest.raises(ValueError, match="two tokens"):
        compare(engine, codec, [7])


class _Refusing(Q8):
    """A codec that accepts no page."""

    def encode(self, group: int, pages: bytes | memoryview) -> bytes:
        raise ValueError("too large")


def store() -> CrashFiles:
    """Return a disk with an empty store on it."""
    files = CrashFiles()
    open_store(files, Time()).close()
    return files


def test_a_check_is_remembered_for_its_model_and_codec() -> None:
    files = store()
    assert recall(files, FOLDER, b"model", "q8") is None
    remember(files, FOLDER, b"model", FOUND)
    assert recall(files, FOLDER, b"model", "q8") == FOUND
    assert recall(files, FOLDER, b"other", "q8") is None
    assert recall(files, FOLDER, b"model", "q4") is None
    assert recall(files, FOLDER / "absent", b"model", "q8") is None
    newer = Comparison("q8", 2000, 1, 8.0, 80.0, 3.0, 9.0)
    remember(files, FOLDER, b"model", newer)
    assert recall(files, FOLDER, b"model", "q8") == newer
    remember(files, FOLDER, b"short", Comparison("q8", 1999, 1, 1.0, 1.0, 0.0, 0.0))
    assert recall(files, FOLDER, b"short", "q8") is None
    again = open_store(files, Time())
    assert again.stats().trouble == "" and recall(files, FOLDER, b"model", "q8") == newer
    again.close()


def test_a_killed_check_does_not_stop_the_next_result_from_being_remembered() -> None:
    """Its leftover temporary file used to have the first name that the next check tried, every time."""
    files = store()
    for number in range(1, 4):
        files.put(FOLDER / f"tmp-{number}", b"half")
    remember(files, FOLDER, b"model", FOUND)
    assert recall(files, FOLDER, b"model", "q8") == FOUND
    assert not [path for path in files.files(FOLDER) if path.name.startswith("tmp-")]


def test_a_damaged_memory_file_is_ignored() -> None:
    """Every bit, every length, and the result of another model under this one's name."""
    files = store()
    remember(files, FOLDER, b"model", FOUND)
    (path,) = [path for path in files.files(FOLDER) if path.name.startswith("checked-")]
    data = files.files(FOLDER)[path]
    for at in range(8 * len(data)):
        bad = bytearray(data)
        bad[at // 8] ^= 1 << at % 8
        files.put(path, bytes(bad))
        assert recall(files, FOLDER, b"model", "q8") is None
    for size in range(len(data)):
        files.put(path, data[:size])
        assert recall(files, FOLDER, b"model", "q8") is None
    files.put(path, data + b"\0")
    assert recall(files, FOLDER, b"model", "q8") is None
    remember(files, FOLDER, b"other", FOUND)
    (other,) = [file for file in files.files(FOLDER) if file.name.startswith("checked-") and file != path]
    files.put(path, files.files(FOLDER)[other])
    assert recall(files, FOLDER, b"model", "q8") is None
    files.put(path, data)
    assert recall(files, FOLDER, b"model", "q8") == FOUND


@pytest.mark.parametrize("at", range(12))
def test_a_crash_or_a_fault_leaves_a_whole_result_or_none(at: int) -> None:
    """Once `remember` has returned, the result survives a power cut (known failure 31)."""
    calls = 0
    files = store()

    def cut(kind: str) -> None:
        nonlocal calls
        calls += 1
        if calls > at:
            raise Crash

    files.after_change = cut
    try:
        remember(files, FOLDER, b"model", FOUND)
        done = True
    except Crash:
        done = False
    for seed in range(20):
        left = files.crash(random.Random(seed))
        assert recall(left, FOLDER, b"model", "q8") in ((FOUND,) if done else (FOUND, None))
    files = store()
    files.fail(Fault(files.calls + at))
    try:
        remember(files, FOLDER, b"model", FOUND)
    except OSError:
        files.heal()
        assert recall(files, FOLDER, b"model", "q8") in (FOUND, None)
    else:
        files.heal()
        assert recall(files, FOLDER, b"model", "q8") == FOUND
    assert at < 11 or done


def judged(perplexity: float = 8.0, divergence: float = 0.0, at_a_place: float = 0.0, agreed: int = 2000) -> str:
    return Comparison("q8", 2000, agreed, 8.0, perplexity, divergence, at_a_place).refusal


def test_a_codec_that_changes_the_model_too_much_is_refused_with_the_figures() -> None:
    """All bounds, at the limit and beyond."""
    assert judged(8.079, 0.01, 0.1) == judged(7.921, 0.01, 0.1) == ""
    said = judged(divergence=0.0101, at_a_place=0.05)
    assert said.startswith(
        "over 2,000 tokens of this model q8 diverges from raw by 0.0101 nats in the mean and 0.0500 "
    )
    assert "0.1001 at the worst place in a hundred" in judged(at_a_place=0.1001)
    for perplexity in (8.09, 7.91):
        assert f"{perplexity / 8 - 1:+.3%}" in judged(perplexity)


def test_near_ties_that_fall_the_other_way_are_no_reason_to_refuse() -> None:
    """SmolLM2 agrees at 96 of 100 positions; at the others two tokens are about equally likely."""
    assert judged(8.003, 0.002, 0.02, agreed=1920) == ""


def test_a_verdict_of_an_older_rule_is_asked_for_again() -> None:
    files = store()
    remember(files, FOLDER, b"model", FOUND)
    (path,) = [path for path in files.files(FOLDER) if path.name.startswith("checked-")]
    files.put(path, b"cairn kv check 1" + files.files(FOLDER)[path][16:])
    assert recall(files, FOLDER, b"model", "q8") is None


@pytest.mark.parametrize("windows", [(0, STATE), (STATE,), (STATE, 0, 24)])
@pytest.mark.parametrize("most", [7, 16, 40, 64, 1000])
def test_a_model_with_states_reads_the_same_in_steps_of_any_length(windows: tuple[int, ...], most: int) -> None:
    engine = FakeEngine(fake_spec(64, 300, windows), blocks=24, max_tokens=most)
    tokens = [(7 * at) % 61 for at in range(280)]
    report = compare(engine, Raw(engine.info.block_bytes, state_groups(engine.info.groups)), tokens)
    scores = engine.oracle_logits(tokens[:-1]).astype(np.float64)
    logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    perplexity = np.exp(-logs[np.arange(len(tokens) - 1), tokens[1:]].mean())
    assert report.agreement == 1 and report.divergence == 0
    assert report.perplexity == pytest.approx(perplexity, rel=1e-4)
