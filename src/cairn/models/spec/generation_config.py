"""generation_config.json and what else of a folder says which tokens end an answer, and how it is sampled.

A generation_config.json that cannot be read is passed over: a model answers without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cairn.models.files import Fields, read_optional_json
from cairn.models.gguf.spec import SAMPLING, suggested
from cairn.types.errors import ModelFileError

GENERATION = "generation_config.json"


class _Added(msgspec.Struct):
    """The part of tokenizer.json that lists its added tokens."""

    added_tokens: list[dict[str, Any]] = []


def end_ids(config: Fields, folder: Path, vocab: int) -> tuple[int, ...]:
    """Ids that end a generation: of generation_config.json, config.json and the tokenizer's eos_token together.

    What the texts of a tokenizer and the chat template say beyond that is known to the front (`text.tokenizer`).
    """
    first = _generation(folder, vocab).ids("eos_token_id", vocab)
    second = config.ids("eos_token_id", vocab)
    added = _added(folder) if first and not set(second) <= set(first) else None
    if added:  # a config.json that came from another model would end answers at ordinary words
        second = tuple(i for i in second if i in added)
    return tuple(dict.fromkeys((*first, *second, *_named_eos(folder, vocab))))


def _named_eos(folder: Path, vocab: int) -> tuple[int, ...]:
    """The tokenizer's eos_token, where its configuration says which id that is."""
    path = folder / "tokenizer_config.json"
    tokenizer = Fields(read_optional_json(path), path)
    token = tokenizer.values.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    for number, added in tokenizer.object("added_tokens_decoder").values.items():
        is_eos = isinstance(added, dict) and content is not None and added.get("content") == content
        if is_eos and number.isdecimal() and int(number[:12]) < vocab:
            return (int(number[:12]),)
    return ()


def _added(folder: Path) -> set[int]:
    """The ids of the added tokens; none where tokenizer.json does not say."""
    try:
        listed = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_Added).added_tokens
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return set()  # who loads the tokenizer says what is wrong with it
    return {one["id"] for one in listed if isinstance(one.get("id"), int)}


def generation_fault(folder: Path, vocab: int) -> str:
    """Return what is wrong with a folder's generation_config.json, which then says nothing; "" for nothing."""
    path = folder / GENERATION
    try:
        fields = Fields(read_optional_json(path), path)
        fields.ids("eos_token_id", vocab)
        _sampling(fields)
    except ModelFileError as error:
        return str(error)
    return ""


def _generation(folder: Path, vocab: int) -> Fields:
    """Return the fields of generation_config.json; none where there is no such file, or something is wrong with it."""
    path = folder / GENERATION
    return Fields({} if generation_fault(folder, vocab) else read_optional_json(path), path)


def sampling_defaults(folder: Path, vocab: int) -> dict[str, float]:
    """Return the sampling defaults of a folder's generation_config.json."""
    return _sampling(_generation(folder, vocab))


def _sampling(fields: Fields) -> dict[str, float]:
    """Return the sampling defaults of generation_config.json. An explicit `do_sample: false` is temperature 0."""
    found = suggested(fields, {name: name for name in SAMPLING})
    if fields.has("do_sample") and not fields.flag("do_sample", True):
        found["temperature"] = 0.0
    return found
