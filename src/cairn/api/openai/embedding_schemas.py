"""Bodies of the routes that make vectors and scores: OpenAI's embeddings, and those of Cohere, Jina, vLLM and Text
Embeddings Inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from cairn.api.http.body import Body, Count, Prompt, Several, Stop
from cairn.types.errors import InvalidRequest, Unsupported


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
    """Which of the model's words stand before each text, such as those for queries."""


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
    """What a decoder judges by."""


class ScoreBody(Body):
    """POST /v1/score, as vLLM has it: one text or several beside one or as many."""

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
    """Return the texts that an `input` holds. InvalidRequest for what is none."""
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
