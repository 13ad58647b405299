"""End tokens and sampling defaults from generation_config.json and the tokenizer's files.

A generation_config.json that cannot be read is ignored: a model answers without it.
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
    """Part of tokenizer.json that lists its added tokens."""

    added_tokens: list[dict[str, Any]] = []


def end_ids(config: Fields, folder: Path, vocab: int) -> tuple[int, ...]:
    """Return the ids that end an answer: from generation_config.json, config.json and the tokenizer's eos_token.

    The front adds what the tokenizer's texts and the chat template imply (`text/tokens/tokenizer.py`).
    """
    first = _generation(folder, vocab).ids("eos_token_id", vocab)
    second = config.ids("eos_token_id", vocab)
    added = _added(folder) if first and not set(second) <= set(first) else None
    if added:  # a config.json copied from another model would otherwise end answers at ordinary words
        second = tuple(i for i in second if i in added)
    return tuple(dict.fromkeys((*first, *second, *_named_eos(folder, vocab))))


def _named_eos(folder: Path, vocab: int) -> tuple[int, ...]:
    """Return the id of the tokenizer's eos_token, if its configuration states it."""
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
    """Return the ids of the added tokens; empty if tokenizer.json cannot be read."""
    try:
        listed = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_Added).added_tokens
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return set()  # loading the tokenizer reports the fault
    return {one["id"] for one in listed if isinstance(one.get("id"), int)}


def generation_fault(folder: Path, vocab: int) -> str:
    """Return what is wrong with a folder's generation_config.json, which is then ignored; "" if nothing."""
    path = folder / GENERATION
    try:
        fields = Fields(read_optional_json(path), path)
        fields.ids("eos_token_id", vocab)
        _sampling(fields)
    except ModelFileError as error:
        return str(error)
    return ""


def _generation(folder: Path, vocab: int) -> Fields:
    """Return the fields of generation_config.json; empty if it is missing or faulty."""
    path = folder / GENERATION
    return Fields({} if generation_fault(folder, vocab) else read_optional_json(path), path)


def sampling_defaults(folder: Path, vocab: int) -> dict[str, float]:
    """Return the sampling defaults of a folder's generation_config.json."""
    return _sampling(_generation(folder, vocab))


def _sampling(fields: Fields) -> dict[str, float]:
    """Return the sampling defaults of generation_config.json. An explicit `do_sample: false` means temperature 0."""
    found = suggested(fields, {name: name for name in SAMPLING})
    if fields.has("do_sample") and not fields.flag("do_sample", True):
        found["temperature"] = 0.0
    return found
