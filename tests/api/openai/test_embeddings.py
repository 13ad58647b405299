"""Embeddings and reranking of a real server process, through the clients that people use."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer

from tests.api.process import Served, served
from tests.encoders import write_encoder, write_reranker, write_tokenizer

POSITIONS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("encoder")
    write_encoder(made, "Bert")
    return write_tokenizer(made)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served(model=str(folder), engine="cpu", threads=1, max_queue=64, max_running=16) as process:
        yield process


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Any, Path]]:
    made = tmp_path_factory.mktemp("judge")
    model = write_encoder(made, "Bert", "ForSequenceClassification", num_labels=1)
    write_tokenizer(made)
    with served(model=str(made), engine="cpu", threads=1) as process:
        yield process, model, made


@pytest.fixture(scope="module")
def chat() -> Iterator[Served]:
    with served() as process:
        yield process


def post(server: Served, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, trust_env=False, verify=False, timeout=30)


def message(server: Served, path: str, **body: Any) -> str:
    response = post(server, path, **body)
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


def words(count: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(count))


def test_the_openai_client_gets_256_texts_in_order(server: Served, folder: Path) -> None:
    texts = [words(1 + seed % 40, seed) for seed in range(256)]
    http = httpx.Client(trust_env=False, verify=False, timeout=60)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, http_client=http) as api:
        result = api.embeddings.create(model="encoder", input=texts)  # the client asks for base64
        plain = api.embeddings.create(model="encoder", input=texts[7], encoding_format="float")
    assert [item.index for item in result.data] == list(range(256))
    assert len(result.data[0].embedding) == 48
    assert np.float32(result.data[7].embedding).tobytes() == np.float32(plain.data[0].embedding).tobytes()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert result.usage.prompt_tokens == result.usage.total_tokens == sum(len(tokenizer.encode(t).ids) for t in texts)
    assert all(abs(np.linalg.norm(item.embedding) - 1) < 1e-5 for item in result.data)


def test_every_form_of_input_gives_the_same_vector(server: Served, folder: Path) -> None:
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("hello there").ids
    forms: list[Any] = ["hello there", ["hello there"], ids, [ids]]
    results = [post(server, "/v1/embeddings", input=form, user="me", dimensions=None).json()["data"] for form in forms]
    assert all(result == results[0] for result in results) and len(results[0]) == 1
    assert post(server, "/embeddings", input="hello there").json()["data"] == results[0]
    assert post(server, "/embed", inputs="hello there").json() == [results[0][0]["embedding"]]
    packed = post(server, "/v1/embeddings", input=ids, encoding_format="base64").json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == results[0][0]["embedding"]


def test_token_ids_of_another_tokenizer_are_refused_if_detectable(server: Served, folder: Path) -> None:
    """LangChain sends batches of token ids through OpenAI's client and does not name the encoding."""
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("hello there").ids
    http = httpx.Client(trust_env=False, verify=False, timeout=60)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, http_client=http) as api:
        with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
            api.embeddings.create(model="any", input=[ids, ids])
        own = api.embeddings.with_raw_response.create(model="any", input=[ids], encoding_format="float")
        assert "own tokenizer" in own.headers["x-cairn-warning"]
        text = api.embeddings.with_raw_response.create(model="any", input=["hello there"])
        assert "x-cairn-warning" not in text.headers
        assert np.allclose(own.parse().data[0].embedding, text.parse().data[0].embedding, atol=1e-6)
    assert "own tokenizer" in post(server, "/v1/embeddings", input=[ids]).headers["x-cairn-warning"]


PIECES = [5, 6, "hello", 7]
OBJECT = {"prompt_string": "hello there"}
PARTS = {"content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]}


@pytest.mark.parametrize(
    ("content", "count"),
    [
        ("", 1),
        ("hello there", 1),
        ([5, 6, 7], 1),
        (PIECES, 1),
        (["one", "two"], 2),
        (["one", [5, 6, 7]], 2),
        ([[5, 6], [5, 6, 7]], 2),
        ([[5, 6, 7], PIECES], 2),
        (OBJECT, 1),
        (PARTS, 1),
        (["one", OBJECT, PARTS], 3),
    ],
)
def test_every_form_of_llamas_input(content: Any, count: int, server: Served) -> None:
    """Texts, ids and lists that mix them, one and several at a time, give the same vectors on both routes."""
    data = post(server, "/v1/embeddings", input=content).json()["data"]
    assert len(data) == count and all(abs(np.linalg.norm(item["embedding"]) - 1) < 1e-5 for item in data)
    assert [item["index"] for item in data] == list(range(count))
    for name in ("input", "content"):
        answer = post(server, "/embedding", **{name: content}).json()
        assert answer == [{"index": item["index"], "embedding": [item["embedding"]]} for item in data]


def test_the_text_of_an_object_is_embedded(server: Served, folder: Path) -> None:
    plain = post(server, "/v1/embeddings", input="hello there").json()
    for one in (OBJECT, PARTS):
        assert post(server, "/v1/embeddings", input=one).json() == plain
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("hello", add_special_tokens=False).ids
    mixed = post(server, "/v1/embeddings", input=PIECES).json()
    assert mixed == post(server, "/v1/embeddings", input=[5, 6, *ids, 7]).json()
    assert mixed["usage"]["prompt_tokens"] == 3 + len(ids)


def test_llamas_route_has_vectors_as_the_model_makes_them_too(server: Served) -> None:
    plain = post(server, "/embed", inputs="some text", normalize=False).json()
    assert post(server, "/embedding", content="some text", embd_normalize=-1).json()[0]["embedding"] == plain
    assert "embd_normalize must be" in message(server, "/embedding", content="x", embd_normalize=0)
    assert "too large" in message(server, "/embedding", content=words(POSITIONS))
    many = post(server, "/v1/embeddings", input=["the same"] * 5).json()
    assert all(item["embedding"] == many["data"][0]["embedding"] for item in many["data"])
    assert (
        many["usage"]["prompt_tokens"]
        == 5 * post(server, "/v1/embeddings", input="the same").json()["usage"]["total_tokens"]
    )


def test_dimensions_are_cut_and_normalised_again(server: Served) -> None:
    whole = np.array(post(server, "/embed", inputs="some text", normalize=False).json()[0])
    cut = np.array(post(server, "/v1/embeddings", input="some text", dimensions=8).json()["data"][0]["embedding"])
    np.testing.assert_allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    assert abs(np.linalg.norm(whole) - 1) > 0.01
    assert "from 1 to 48" in message(server, "/v1/embeddings", input="x", dimensions=49)
    assert "needs normalize to be true" in message(server, "/v1/embeddings", input="x", dimensions=8, normalize=False)


def test_a_text_that_is_too_long_is_refused_with_figures_or_cut(server: Served) -> None:
    long = words(POSITIONS)
    said = message(server, "/v1/embeddings", input=["a", long])
    assert "input[1] has 302 tokens" in said and "at most 300" in said and "truncate" in said
    cut = post(server, "/v1/embeddings", input=long, truncate=True).json()
    assert cut["usage"]["prompt_tokens"] == POSITIONS
    assert cut["data"] == post(server, "/v1/embeddings", input=words(POSITIONS)[: 2 * 298 - 1]).json()["data"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input is empty"),
        ({"input": ["a", 5, None]}, "input must be a text"),
        ({"input": [["a", "b"]]}, "input must be a text"),
        ({"input": [[True]]}, "input must be a text"),
        ({"input": {"content": "x"}}, "a content that is a list of parts"),
        ({"input": {"content": [{"type": "input_audio", "input_audio": {}}]}}, "must be a text part"),
        ({"input": ["a", {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "input[1].content[0]"),
        ({"input": {"prompt_string": "x", "multimodal_data": ["x"]}}, "input must hold a prompt_string"),
        ({"input": [5, 500]}, "token id 500"),
        ({"input": [-1]}, "token id -1"),
        ({"input": ["x"] * 2049}, "2049 texts; the limit is 2048"),
        ({"input": {"text": "x"}}, "input must hold a prompt_string"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "dimension": 3}, "dimension"),
        ({}, "input"),
    ],
)
def test_bad_input_is_named(body: dict[str, Any], said: str, server: Served) -> None:
    assert said in message(server, "/v1/embeddings", **body)


def test_an_encoder_answers_no_chat(server: Served, judge: tuple[Served, Any, Path]) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
    ):
        assert "makes embeddings and answers nothing; use /v1/embeddings" in message(server, path, **body)
        assert "judges texts and answers nothing; use /v1/rerank" in message(judge[0], path, **body)
    assert "makes no embeddings" in message(judge[0], "/v1/embeddings", input="x")
    kinds = [
        httpx.get(one.url + "/v1/models", trust_env=False, verify=False).json()["data"][0]["kind"]
        for one in (server, judge[0])
    ]
    assert kinds == ["embed", "rerank"]


def test_a_judge_ranks_as_transformers_scores(judge: tuple[Served, Any, Path]) -> None:
    server, model, folder = judge
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    query, texts = "what is it", [words(size, size) for size in (3, 20, 70, 1)]
    want = []
    for text in texts:
        pair = tokenizer.encode(query, text)
        with torch.no_grad():
            types = torch.tensor([pair.type_ids])
            want.append(float(torch.sigmoid(model(torch.tensor([pair.ids]), token_type_ids=types).logits[0, 0])))
    order = sorted(range(4), key=lambda at: -want[at])
    answer = post(server, "/v1/rerank", query=query, documents=texts, return_documents=True).json()
    assert [result["index"] for result in answer["results"]] == order
    assert [result["document"]["text"] for result in answer["results"]] == [texts[at] for at in order]
    np.testing.assert_allclose(
        [result["relevance_score"] for result in answer["results"]], sorted(want)[::-1], atol=1e-5
    )
    objects = [{"text": text} for text in texts]
    assert len(post(server, "/rerank", query=query, documents=objects, top_n=2).json()["results"]) == 2
    assert post(server, "/v2/rerank", query=query, documents=texts).status_code == 200
    tei = post(server, "/rerank", query=query, texts=texts, raw_scores=True).json()
    assert [one["index"] for one in tei] == order and {*tei[0]} == {"index", "score"}
    np.testing.assert_allclose([1 / (1 + np.exp(-one["score"])) for one in tei], sorted(want)[::-1], atol=1e-5)
    scored = post(server, "/v1/score", text_1=query, text_2=texts).json()["data"]
    np.testing.assert_allclose([one["score"] for one in scored], want, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/rerank", {"query": "q"}, "give documents, or texts"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query is empty"),
        ("/v1/rerank", {"query": "q", "documents": []}, "documents is empty"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n must be from 1"),
        ("/v1/rerank", {"query": "q", "documents": ["a", words(400)]}, "documents[1] with its query has 404 tokens"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1 holds 2 texts and text_2 3"),
    ],
)
def test_bad_pairs_are_named(path: str, body: dict[str, Any], said: str, judge: tuple[Served, Any, Path]) -> None:
    assert said in message(judge[0], path, **body)


def test_a_decoder_ranks_by_an_instruction(server: Served, tmp_path: Path) -> None:
    folder = write_reranker(tmp_path / "qwen3-reranker-tiny")
    texts = ["Paris is in France.", "Cats sleep.", "A kind of bread."]
    with served(model=str(folder), engine="cpu", threads=1) as process:
        ranked = post(process, "/v1/rerank", query="Where is Paris?", documents=texts).json()["results"]
        scored = post(process, "/v1/score", text_1="Where is Paris?", text_2=texts).json()["data"]
        by_index = {one["index"]: one["relevance_score"] for one in ranked}
        assert [one["score"] for one in scored] == [by_index[at] for at in range(3)]
        assert all(0 < one["score"] < 1 for one in scored)
        other = post(process, "/rerank", query="Where is Paris?", texts=texts, instruction="Find cats.").json()
        assert {one["index"]: one["score"] for one in other} != by_index
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        assert "judges texts and answers nothing" in message(process, "/v1/chat/completions", **chat)
    said = message(server, "/v1/rerank", query="q", documents=["a"], instruction="Find cats.")
    assert "takes no instruction" in said


def test_tokenize_shows_what_an_encoder_reads(server: Served, folder: Path) -> None:
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("hello").ids
    assert post(server, "/tokenize", prompt="hello").json()["tokens"] == ids
    assert post(server, "/tokenize", prompt="hello", add_special_tokens=False).json()["tokens"] == ids[1:-1]
    assert 3 not in post(server, "/tokenize", content="[SEP]").json()["tokens"][1:-1]


def test_a_decoder_serves_chats_and_embeddings(chat: Served) -> None:
    assert "input is empty: it has no tokens" in message(chat, "/v1/embeddings", input="")
    items = post(chat, "/v1/embeddings", input=["one text", "another", "one text"]).json()["data"]
    assert items[0]["embedding"] == items[2]["embedding"] != items[1]["embedding"]
    said = post(chat, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=2)
    assert said.status_code == 200
    assert 0.99 < post(chat, "/v1/score", text_1="a", text_2="a").json()["data"][0]["score"] < 1.01


def test_ollamas_routes(server: Served) -> None:
    whole = post(server, "/v1/embeddings", input=["hello", "there"]).json()
    answer = post(server, "/api/embed", input=["hello", "there"], model="any", keep_alive="5m").json()
    assert answer["embeddings"] == [item["embedding"] for item in whole["data"]]
    assert answer["prompt_eval_count"] == whole["usage"]["prompt_tokens"]
    plain = post(server, "/v1/embeddings", input="hello", normalize=False).json()["data"][0]["embedding"]
    assert post(server, "/api/embeddings", prompt="hello").json()["embedding"] == plain
    long = " ".join(["hello"] * 2 * POSITIONS)
    assert post(server, "/api/embed", input=long).status_code == 200, "it is cut"
    refused = post(server, "/api/embed", input=long, truncate=False)
    assert refused.status_code == 400 and "input" in refused.json()["error"]
    (model,) = httpx.get(server.url + "/api/tags", trust_env=False, verify=False).json()["models"]
    assert post(server, "/api/show", model=model["name"]).json()["capabilities"] == ["embedding"]
    chat = post(server, "/api/chat", messages=[{"role": "user", "content": "hi"}])
    assert chat.status_code == 400 and isinstance(chat.json()["error"], str)


def test_passages_of_a_collection_are_judged_where_a_reranker_is_loaded(
    folder: Path, judge: tuple[Served, Any, Path], tmp_path: Path
) -> None:
    config = tmp_path / "cairn.toml"
    models = {"embeds": folder, "judges": judge[2]}
    lines = [f'[[models]]\nmodel = "{place}"\naliases = ["{name}"]\n' for name, place in models.items()]
    config.write_text("".join(lines))
    texts = [f"cat {' '.join(words)}" for words in (["dog"], ["a", "the"], ["paris"], ["the", "dog", "cat"])]
    with served(config_file=str(config), engine="cpu", threads=1, agents_dir=str(tmp_path / "agents")) as server:
        assert post(server, "/v1/collections", id="c").status_code == 201
        for text in texts:
            assert post(server, "/v1/collections/c/documents", name="a.txt", text=text).json()["chunks"] == 1
        ranked = post(server, "/v1/rerank", query="a cat", documents=texts).json()
        best = ranked["results"][:2]
        answer = post(server, "/v1/collections/c/search", query="a cat", top_k=2).json()
        assert answer["reranked_by"] == ranked["model"]
        assert [item["text"] for item in answer["data"]] == [texts[one["index"]] for one in best]
        scores = [one["relevance_score"] for one in best]
        assert [item["rerank_score"] for item in answer["data"]] == pytest.approx(scores, abs=1e-5)
        plain = post(server, "/v1/collections/c/search", query="a cat", rerank=False).json()
        assert plain["reranked_by"] is None and "rerank_score" not in plain["data"][0]
        said = message(server, "/v1/collections/c/search", query="a cat", rerank_model="embeds")
        assert "is no model for reranking" in said
        store = {"query": "a cat", "max_num_results": 2}
        by_judge = post(server, "/v1/vector_stores/c/search", **store).json()["data"]
        assert [one["score"] for one in by_judge] == pytest.approx(scores, abs=1e-5)
        alone = post(server, "/v1/vector_stores/c/search", **store, ranking_options={"ranker": "none"}).json()["data"]
        assert [one["score"] for one in alone] == pytest.approx([item["score"] for item in plain["data"][:2]], abs=1e-5)


def test_an_embedding_models_scores_name_the_text_that_is_too_long(server: Served) -> None:
    for query, documents, said in (
        ("q", ["a", words(400)], "documents[1] has "),
        (words(400), ["a", "b"], "the query of documents[0] has "),
    ):
        assert message(server, "/v1/rerank", query=query, documents=documents).startswith(said)
    texts = [f"{number}" for number in range(2048)]
    ranked = post(server, "/v1/rerank", query="what", documents=texts, top_n=1)
    assert ranked.status_code == 200, ranked.text
