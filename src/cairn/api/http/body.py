"""What all request bodies are made of: the strict base, and shapes of fields that several have.

Numbers are only typed here; their ranges are checked in `frontend/requests.py`, lengths of lists there and in `parse`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

Place = Literal[
    "request",
    "messages",
    "responses",
    "ollama",
    "options",
    "model",
    "embedding",
    "tokenize",
    "stream_options",
    "message",
    "part",
    "tool",
    "function",
    "call",
    "called",
    "other",
]
"""What kind of object a field stands in."""


class Body(BaseModel):
    """Strict: no field but these, no number written as text."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    place: ClassVar[Place] = "other"
    within: ClassVar[dict[str, type[Body]]] = {}
    """The fields that hold such bodies, one or a list of them."""
    lenient: ClassVar[bool] = False
    """Unknown fields are passed over, which the sender is told in a header."""
    synonyms: ClassVar[Mapping[str, str]] = {}
    """Other names of fields, which count where the field's own is absent."""
    attached: ClassVar[str] = ""
    """The field whose messages or items may hold images and files."""

    @classmethod
    def usual(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Return the object in its usual form, where clients write it in others too."""
        return value


def _whole(value: Any) -> Any:
    """4.0 is a whole number, as of clients whose numbers are all floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


T = TypeVar("T")
Several = Annotated[list[T], Field(fail_fast=True)]
"""A list that is read up to its first error: collecting those of a long one would hold everybody up."""


def text_or_list(value: Any) -> str | None:
    """The tag of a field that is a text or a list."""
    return "~text" if isinstance(value, str) else "~list" if isinstance(value, list) else None


Number = float | None
Count = Annotated[int | None, BeforeValidator(_whole)]
Stop = Annotated[
    Annotated[str, Tag("~text")] | Annotated[Several[str], Tag("~list")],
    Discriminator(text_or_list, custom_error_type="stop", custom_error_message="must be a text or a list of texts"),
]


def _prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "~text"
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    if isinstance(first, str):
        return "~texts"
    return "~batch" if isinstance(first, list) else "~tokens"


Prompt = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[Several[str], Tag("~texts")]
    | Annotated[Several[int], Tag("~tokens")]
    | Annotated[Several[Several[int]], Tag("~batch")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt",
        custom_error_message="must be a text, a list of texts, a list of token ids or a list of such lists",
    ),
]
