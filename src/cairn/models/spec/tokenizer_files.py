"""The tokenizer that `--tokenizer` names instead of a model's own: its files, and what it makes of the model.

This imports little: a server's front reads tokenizers, and no weights.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from cairn.config.paths import expanded
from cairn.models.hub.digests import file_digest
from cairn.types.errors import ModelFileError
from cairn.types.model_spec import ModelSpec

TOKENIZER = "tokenizer.json"
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside a tokenizer.json that belong to it."""


def given_file(given: str) -> Path:
    """Return the tokenizer.json that `--tokenizer` names or whose folder it names; raise ModelFileError if missing."""
    path = expanded(given)
    path = path / TOKENIZER if path.is_dir() else path
    if not path.is_file():
        raise ModelFileError(f"{path}: there is no such file; --tokenizer is a tokenizer.json, or a folder with one")
    return path


def companions(path: Path) -> list[Path]:
    """Return the existing companion files of a tokenizer.json."""
    return [path.with_name(name) for name in COMPANIONS if path.with_name(name).is_file()]


def with_tokenizer(spec: ModelSpec, given: str | None) -> ModelSpec:
    """Return the spec with the identity it has under another tokenizer, where the same ids mean other texts.

    KV depends on token ids alone, so an engine keeps the model's own identity.
    """
    if given is None:
        return spec
    path = given_file(given)
    digest = hashlib.sha256(b"cairn-tokenizer-1\0" + spec.identity)
    for one in (path, *companions(path)):
        digest.update(one.name.encode() + b"\0" + file_digest(one))
    return msgspec.structs.replace(spec, identity=digest.digest())


def check_fits(spec: ModelSpec, given: str, largest: int) -> None:
    """Raise ModelFileError if the tokenizer has an id beyond the model's vocabulary."""
    if largest >= spec.vocab:
        raise ModelFileError(
            f"{given_file(given)}: has the token id {largest}, but {spec.name} has {spec.vocab} tokens, "
            f"0 to {spec.vocab - 1}; this is the tokenizer of another model"
        )
