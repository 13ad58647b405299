"""The files of a tokenizer that is given in place of a model's own (`--tokenizer`)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from cairn.config.paths import expanded
from cairn.models.hub.digests import file_digest
from cairn.types.errors import ModelFileError
from cairn.types.model_spec import ModelSpec

NAME = "tokenizer.json"
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")
"""What belongs to a tokenizer.json that lies beside them."""


def given_file(given: str) -> Path:
    """The tokenizer.json that was named, or that is in the folder that was. Raises ModelFileError."""
    path = expanded(given)
    path = path / NAME if path.is_dir() else path
    if not path.is_file():
        raise ModelFileError(f"{path}: there is no such file; --tokenizer is a tokenizer.json, or a folder with one")
    return path


def companions(path: Path) -> list[Path]:
    """What lies beside a tokenizer.json and belongs to it."""
    return [path.with_name(name) for name in COMPANIONS if path.with_name(name).is_file()]


def with_tokenizer(spec: ModelSpec, given: str | None) -> ModelSpec:
    """The spec under the identity that it has with another tokenizer: the same ids are other texts then.

    KV depends on ids alone, so an engine keeps the model's own.
    """
    if given is None:
        return spec
    path = given_file(given)
    digest = hashlib.sha256(b"cairn-tokenizer-1\0" + spec.identity)
    for one in (path, *companions(path)):
        digest.update(one.name.encode() + b"\0" + file_digest(one))
    return msgspec.structs.replace(spec, identity=digest.digest())


def check_fits(spec: ModelSpec, given: str, largest: int) -> None:
    """Raise ModelFileError for a tokenizer with an id that the model has no row for."""
    if largest >= spec.vocab:
        raise ModelFileError(
            f"{given_file(given)}: has the token id {largest}, but {spec.name} has {spec.vocab} tokens, "
            f"0 to {spec.vocab - 1}; this is the tokenizer of another model"
        )
