"""all-MiniLM-L6-v2 from its wheel: the vectors of transformers' own forward pass, and texts that belong together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import transformers

from cairn import LLM
from tests.real_models import minilm

TEXTS = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "Två ord på svenska, und drei auf Deutsch.",
    "x",
    "def main():\n    return [SEP]  # a control token that somebody has typed",
    " ".join(f"sentence {number} says a little more than the last one." for number in range(18)),
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(minilm()), threads=1) as loaded:
        yield loaded


def test_vectors_are_those_of_transformers(llm: LLM) -> None:
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm())
    model = transformers.AutoModel.from_pretrained(minilm()).eval()
    got = llm.embed(TEXTS)
    for text, vector in zip(TEXTS, got, strict=True):
        if "[SEP]" in text:  # text here, but a control token in the vocabulary
            continue
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
        mean = states.mean(axis=0)
        want = mean / np.linalg.norm(mean)
        assert float(vector @ want) >= 0.99999
        np.testing.assert_allclose(vector, want, rtol=0, atol=2e-6)


def test_a_vector_is_the_same_alone_and_in_a_batch(llm: LLM) -> None:
    together = llm.embed(TEXTS)
    assert [llm.embed(text).tobytes() for text in TEXTS] == [one.tobytes() for one in together]


def test_related_texts_have_near_vectors(llm: LLM) -> None:
    documents = ["Paris is the capital of France.", "Cats sleep most of the day.", "France is famous for its wine."]
    scores = llm.score("What is the capital of France?", documents)
    assert scores[0] > 0.8 > scores[2] > scores[1]
