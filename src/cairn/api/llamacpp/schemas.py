"""Bodies of llama-server's own routes.

Shapes: github.com/ggml-org/llama.cpp, tools/server/README.md. Other fields of theirs are in `fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from cairn.api.chat.schemas import Generation
from cairn.api.http.body import Body, Count, Several
from cairn.types.errors import InvalidRequest, Unsupported

MAX_FIELDS = 64
"""Fields of an answer that a request may choose."""
MAX_PIECES = 256
"""Pieces of a prompt that is a list of texts and tokens."""


class LlamaBody(Generation):
    """The fields that /completion and /infill share."""

    synonyms: ClassVar[Mapping[str, str]] = {**Generation.synonyms, "n_cmpl": "n"}

    parse_special: bool | None = None
    n_probs: Count = None
    return_tokens: bool | None = None
    response_fields: Several[str] | None = Field(default=None, max_length=MAX_FIELDS)

    @classmethod
    def usual(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return the body unchanged: -1 tokens, by any name, mean as many as there is room for."""
        return value


class LlamaCompletionBody(LlamaBody):
    """POST /completion."""

    prompt: Any
    """A text, token ids, a list of both that is one prompt, or a list of prompts."""


class Extra(Body):
    """A file beside the one to be filled in."""

    filename: str | None = None
    text: str


class InfillBody(LlamaBody):
    """POST /infill."""

    within: ClassVar[dict[str, type[Body]]] = LlamaBody.within | {"input_extra": Extra}

    input_prefix: str
    input_suffix: str
    input_extra: Several[Extra] | None = Field(default=None, max_length=MAX_PIECES)
    prompt: str | None = None
    """The beginning of the text to fill in."""


def plain(given: dict[str, Any]) -> dict[str, Any]:
    """Return the body with a `logit_bias` of pairs as an object; false forbids a token."""
    bias = given.get("logit_bias")
    if not isinstance(bias, list):
        return given
    found: dict[str, float] = {}
    for pair in bias:
        if not isinstance(pair, list) or len(pair) != 2 or isinstance(pair[0], bool) or not isinstance(pair[0], int):
            raise InvalidRequest("logit_bias must hold pairs of a token id and a bias", field="logit_bias")
        found[str(pair[0])] = -100.0 if pair[1] is False else pair[1]
    return given | {"logit_bias": found}


def prompts_of(given: Any, most: int) -> list[list[str | int]]:
    """Return the prompts of a body, each as its pieces: texts and token ids."""
    found = _pieces(given)
    if found is not None:
        return [found]
    if not isinstance(given, list) or not given:
        raise InvalidRequest("prompt must be a text, token ids, a list of both, or a list of prompts", field="prompt")
    if len(given) > most:
        raise InvalidRequest(f"prompt holds {len(given)} prompts; the limit is {most}", field="prompt")
    prompts = [_pieces(one) for one in given]
    if any(one is None for one in prompts):
        raise InvalidRequest("prompt must hold texts, or lists of texts and token ids", field="prompt")
    return [one for one in prompts if one is not None]


def _pieces(given: Any) -> list[str | int] | None:
    """Return the pieces of one prompt; None for anything else, also for several prompts."""
    if isinstance(given, dict):
        if given.get("multimodal_data"):
            raise Unsupported("prompt.multimodal_data: this model reads texts alone", field="prompt")
        given = given.get("prompt_string")
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given or any(isinstance(one, bool) for one in given):
        return None
    if not all(isinstance(one, str | int) for one in given) or all(isinstance(one, str) for one in given):
        return None
    if sum(isinstance(one, str) for one in given) > MAX_PIECES:
        raise InvalidRequest(f"prompt holds more than {MAX_PIECES} texts between its tokens", field="prompt")
    return given
