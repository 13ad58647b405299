"""Vectors and scores: POST /v1/embeddings, /embed, /v1/rerank and /v1/score.

OpenAI's embeddings (platform.openai.com/docs/api-reference/embeddings); Text Embeddings Inference's /embed and its form
of /rerank, recognised by its field `texts`; Cohere's and Jina's /rerank; vLLM's /score.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import msgspec

from cairn.api.chat.generation import check_model
from cairn.api.chat.parse import parse
from cairn.api.chat.state import ServerState
from cairn.api.http.body import Body, Count, Prompt, Several, Stop, read_json
from cairn.api.http.call import Disconnected, HTTPCall, Watch, encode
from cairn.api.http.routes import Route
from cairn.frontend.embeddings import (
    AT_ONCE,
    MAX_TEXTS,
    EmbeddingCall,
    Text,
    check_dimensions,
    check_embeds,
    check_scores,
    finished,
    scores,
    vectors,
)
from cairn.frontend.service import Service
from cairn.types.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from cairn.frontend.embeddings import Vector


INLINE_NUMBERS = 1 << 14
"""Numbers of vectors that are written on the event loop; that takes a millisecond or two."""


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    place = "embedding"

    model: str | None = None
    input: Any
    """A text, token ids, both in one list, or a list of any of these; llama.cpp's objects of a text too."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count = None
    truncate: bool | None = None
    """Whether a text that is longer than the model takes is cut."""
    normalize: bool | None = None
    """False: the vectors as the model makes them; default: of length 1."""
    prompt_name: str | None = None
    """The model's prompt to put before each text, such as the one for queries."""


class LlamaEmbeddingBody(Body):
    """POST /embedding, as llama.cpp has it."""

    place = "embedding"
    synonyms: ClassVar[Mapping[str, str]] = {"content": "input"}

    model: str | None = None
    input: Any
    embd_normalize: Count = None
    """-1: the vectors as the model makes them; 2, the default: of length 1."""


class TextsBody(Body):
    """POST /embed, as Text Embeddings Inference has it."""

    place = "embedding"

    model: str | None = None
    inputs: Prompt
    truncate: bool | None = None
    normalize: bool | None = None
    dimensions: Count = None
    prompt_name: str | None = None


class Document(Body):
    """`{"text": ...}`."""

    text: str


class RerankBody(Body):
    """POST /v1/rerank: `documents` as Cohere and Jina have them, or `texts` as Text Embeddings Inference does."""

    place = "embedding"
    within: ClassVar[dict[str, type[Body]]] = {"documents": Document}
    synonyms: ClassVar[Mapping[str, str]] = {"top_k": "top_n", "return_text": "return_documents"}

    model: str | None = None
    query: str
    documents: Several[str | Document] | None = None
    texts: Several[str] | None = None
    top_n: Count = None
    return_documents: bool | None = None
    truncate: bool | None = None
    raw_scores: bool | None = None
    """Whether the scores of a judge are those before the logistic function."""
    instruction: str | None = None
    """The instruction by which a decoder judges."""


class ScoreBody(Body):
    """POST /v1/score, as vLLM has it: one `text_1`, or as many as `text_2`."""

    place = "embedding"
    synonyms: ClassVar[Mapping[str, str]] = {
        "queries": "text_1",
        "documents": "text_2",
        "data_1": "text_1",
        "data_2": "text_2",
    }

    model: str | None = None
    text_1: Stop
    text_2: Stop
    truncate: bool | None = None
    instruction: str | None = None


SHAPES = "must be a text, a list of texts, a list of token ids or a list of such lists"


def texts_of(given: Any, field: str) -> list[str | list[int | str]]:
    """Return the texts of an `input`. Raises InvalidRequest for any other shape."""
    if (one := _text(given, field)) is not None:
        return [one]
    if not isinstance(given, list) or not given:
        raise InvalidRequest(f"{field} {SHAPES}{'' if given else ', and hold at least one'}", field=field)
    found = [_text(item, f"{field}[{at}]", inner=True) for at, item in enumerate(given)]
    if any(one is None for one in found):
        raise InvalidRequest(f"{field} {SHAPES}", field=field)
    return [one for one in found if one is not None]


def _text(given: Any, where: str, *, inner: bool = False) -> str | list[int | str] | None:
    """Return one text: itself, a list with at least one token id, or what an object of llama.cpp's holds."""
    if isinstance(given, dict):
        return _object(given, where)
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not all(type(one) in (int, str) for one in given):
        return None
    return given if any(isinstance(one, int) for one in given) or (inner and not given) else None


def _object(given: dict[str, Any], where: str) -> str:
    if isinstance(text := given.get("prompt_string"), str) and not given.get("multimodal_data"):
        return text
    parts = given.get("content")
    if not isinstance(parts, list):
        raise InvalidRequest(f"{where} must hold a prompt_string, or a content that is a list of parts", field=where)
    texts = []
    for at, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Unsupported(f"{where}.content[{at}] must be a text part: vectors are made of texts", field=where)
        texts.append(part["text"])
    return "".join(texts)


class Embeddings:
    """The routes of models that make vectors or judge texts."""

    def __init__(self, state: ServerState) -> None:
        self._config = state.config

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("POST", "/v1/embeddings", self.embeddings, EmbeddingBody, model="embed"),
            Route("POST", "/v1/rerank", self.rerank, RerankBody, model="rerank"),
            Route("POST", "/v2/rerank", self.rerank, RerankBody, model="rerank"),
            Route("POST", "/v1/reranking", self.rerank, RerankBody, model="rerank"),
            Route("POST", "/v1/score", self.score, ScoreBody, model="rerank"),
            Route("POST", "/embed", self.embed, TextsBody, model="embed"),
            Route("POST", "/embedding", self.embedding, LlamaEmbeddingBody, model="embed"),
        ]

    async def embeddings(self, call: HTTPCall, service: Service) -> None:
        """Return vectors of texts."""
        body = parse(EmbeddingBody, await read_json(call, self._config), self._config, call)
        check_model(body.model, service)
        asking = self.asking(call, body.truncate, "input", body.prompt_name)
        texts = texts_of(body.input, "input")
        _check_ids(call, body, texts)
        made, tokens = await self.made(call, service, texts, asking, body.dimensions, body.normalize)
        shown = _base64 if body.encoding_format == "base64" else floats
        data = await written(made, lambda at, one: {"object": "embedding", "index": at, "embedding": shown(one)})
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        await call.json({"object": "list", "data": data, "model": service.name, "usage": usage})

    async def embed(self, call: HTTPCall, service: Service) -> None:
        """Return vectors of texts, as a list and nothing else."""
        body = parse(TextsBody, await read_json(call, self._config), self._config, call)
        check_model(body.model, service)
        asking = self.asking(call, body.truncate, "inputs", body.prompt_name)
        made, _ = await self.made(call, service, body.inputs, asking, body.dimensions, body.normalize)
        await call.json(await written(made, lambda at, one: floats(one)))

    async def embedding(self, call: HTTPCall, service: Service) -> None:
        """Return vectors of texts in llama-server's form. Each is an object with one vector in a list."""
        body = parse(LlamaEmbeddingBody, await read_json(call, self._config), self._config, call)
        check_model(body.model, service)
        if body.embd_normalize not in (None, -1, 2):
            raise InvalidRequest(
                f"embd_normalize must be -1 (as the model makes them) or 2 (of length 1); it is {body.embd_normalize}",
                field="embd_normalize",
            )
        asking = self.asking(call, None, "input")
        texts = texts_of(body.input, "input")
        made, _ = await self.made(call, service, texts, asking, None, body.embd_normalize != -1)
        await call.json(await written(made, lambda at, one: {"index": at, "embedding": [floats(one)]}))

    async def rerank(self, call: HTTPCall, service: Service) -> None:
        """Sort texts by how well they fit a query, the best first."""
        body = parse(RerankBody, await read_json(call, self._config), self._config, call)
        check_model(body.model, service)
        check_scores(service)
        if (body.documents is None) == (body.texts is None):
            raise InvalidRequest("give documents, or texts, and not both", field="documents")
        name, given = ("texts", body.texts) if body.documents is None else ("documents", body.documents)
        texts = [one.text if isinstance(one, Document) else one for one in given or []]
        _check_many(texts, name)
        if not body.query:
            raise InvalidRequest("query is empty", field="query")
        most = len(texts) if body.top_n is None else body.top_n
        if most < 1:
            raise InvalidRequest(f"top_n must be from 1; it is {most}", field="top_n")
        asking = self.asking(call, body.truncate, name, instruction=body.instruction)
        pairs = [(body.query, text) for text in texts]
        found, tokens = await self._scores(call, service, pairs, asking, raw=bool(body.raw_scores))
        best = sorted(range(len(found)), key=lambda at: -found[at])[:most]
        if body.texts is not None:
            told = body.return_documents
            await call.json([{"index": at, "score": found[at]} | ({"text": texts[at]} if told else {}) for at in best])
            return
        results: list[dict[str, Any]] = [{"index": at, "relevance_score": found[at]} for at in best]
        if body.return_documents:
            for one in results:
                one["document"] = {"text": texts[one["index"]]}
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        await call.json({"id": call.id, "object": "list", "model": service.name, "results": results, "usage": usage})

    async def score(self, call: HTTPCall, service: Service) -> None:
        """Return one score for each pair of texts."""
        body = parse(ScoreBody, await read_json(call, self._config), self._config, call)
        check_model(body.model, service)
        check_scores(service)
        first, second = _listed(body.text_1), _listed(body.text_2)
        _check_many(first, "text_1")
        _check_many(second, "text_2")
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"text_1 holds {len(first)} texts and text_2 {len(second)}; give one text_1, or as many", field="text_1"
            )
        pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
        asking = self.asking(call, body.truncate, "text_2", instruction=body.instruction)
        found, tokens = await self._scores(call, service, pairs, asking)
        data = [{"index": at, "object": "score", "score": one} for at, one in enumerate(found)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        await call.json({"id": call.id, "object": "list", "model": service.name, "data": data, "usage": usage})

    def asking(
        self,
        call: HTTPCall,
        truncate: bool | None,
        field: str,
        prompt_name: str | None = None,
        instruction: str | None = None,
    ) -> EmbeddingCall:
        """Return the options of embedding a call's texts."""
        return EmbeddingCall(
            salt=call.salt,
            share=call.share,
            timeout=self._config.request_timeout,
            at_once=max(1, min(AT_ONCE, self._config.max_queue // 2)),
            truncate=bool(truncate),
            field=field,
            prompt_name=prompt_name,
            instruction=instruction,
        )

    async def made(
        self,
        call: HTTPCall,
        service: Service,
        given: object,
        asking: EmbeddingCall,
        dimensions: int | None,
        normalize: bool | None,
    ) -> tuple[list[Vector], int]:
        """Return the vectors of a body's texts, and how many tokens these have."""
        check_embeds(service)
        normalized = normalize is not False
        check_dimensions(service, dimensions, normalize=normalized)
        async with Watch(call) as watch:
            made, tokens = await vectors(service, _texts(given), asking)
            watch.stop()
        if watch.left:
            raise Disconnected
        call.tokens = (tokens, 0)
        return finished(made, dimensions, normalize=normalized), tokens

    async def _scores(
        self,
        call: HTTPCall,
        service: Service,
        pairs: list[tuple[str, str]],
        asking: EmbeddingCall,
        *,
        raw: bool = False,
    ) -> tuple[list[float], int]:
        async with Watch(call) as watch:
            found, tokens = await scores(service, pairs, asking, raw=raw)
            watch.stop()
        if watch.left:
            raise Disconnected
        call.tokens = (tokens, 0)
        return found, tokens


def _texts(given: object) -> list[Text]:
    """Return a body's text, texts or lists of token ids as a list."""
    if isinstance(given, str):
        return [given]
    listed = cast("list[Any]", given)
    return [listed] if listed and isinstance(listed[0], int) else listed


def _check_ids(call: HTTPCall, body: EmbeddingBody, texts: Sequence[Text]) -> None:
    """Refuse token ids of another model's tokenizer, whose vectors would mean nothing.

    LangChain's OpenAIEmbeddings by default cuts texts into tokens of OpenAI's models. It sends batches of ids through
    OpenAI's client for Python, which adds base64 if its caller names no encoding. A client with ids of this model's own
    names an encoding, and is only reminded.
    """
    if all(isinstance(one, str) for one in texts):
        return
    agent = call.header(b"user-agent") or b""
    several = isinstance(body.input, list) and all(isinstance(one, list) for one in body.input)
    if several and body.encoding_format == "base64" and re.match(rb"(?:Async)?OpenAI/Python", agent):
        raise InvalidRequest(
            "input holds token ids of another model's tokenizer, as LangChain's OpenAIEmbeddings sends them: create it "
            "with check_embedding_ctx_length=False, and it sends texts. Ids of this model's own tokenizer are read "
            'with encoding_format "float"',
            field="input",
        )
    call.warn("input holds token ids: they must be those of this model's own tokenizer, as /tokenize gives them")


def _listed(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def _check_many(texts: Sequence[str], name: str) -> None:
    if not texts:
        raise InvalidRequest(f"{name} is empty; it must hold at least one text", field=name)
    if len(texts) > MAX_TEXTS:
        raise InvalidRequest(f"{name} holds {len(texts)} texts; the limit is {MAX_TEXTS}", field=name)
    for at, text in enumerate(texts):
        if not text:
            raise InvalidRequest(f"{name}[{at}] is empty", field=name)


async def written(vectors: Sequence[Vector], entry: Callable[[int, Vector], Any]) -> msgspec.Raw:
    """Return a JSON list with the entry of each vector, given its place and the vector.

    Many numbers are written in a thread, vector by vector: one long call would hold the event loop up there, too.
    """

    def write() -> msgspec.Raw:
        return msgspec.Raw(b"[" + b",".join(encode(entry(at, one)) for at, one in enumerate(vectors)) + b"]")

    return write() if sum(map(len, vectors)) <= INLINE_NUMBERS else await asyncio.to_thread(write)


def floats(vector: Vector) -> list[float]:
    """Return a vector as a list of floats."""
    floats: list[float] = vector.tolist()
    return floats


def _base64(vector: Vector) -> str:
    """Return a vector as base64 of little-endian float32 numbers, as OpenAI's clients read it."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
