"""Bodies of the routes that make vectors and scores: OpenAI's embeddings, and those of Cohere, Jina, vLLM and Text
Embeddings Inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from cairn.api.http.body import Body, Count, Prompt, Several, Stop


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    place = "embedding"

    model: str | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count = None
    truncate: bool | None = None
    """Whether a text that is longer than the model takes is cut."""
    normalize: bool | None = None
    """False: the vectors as the model makes them; default: of length 1."""
    prompt_name: str | None = None
    """Which of the model's words stand before each text, such as those for queries."""


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
