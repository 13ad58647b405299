"""What a GGUF file says of its special tokens. This imports little: a server's front reads no weights."""

from __future__ import annotations

import numpy as np

from cairn.models.families.end_tokens import is_spelt_as_control
from cairn.models.gguf.reader import Gguf
from cairn.types.errors import ModelFileError

ENCODERS = ("bert", "modern-bert", "nomic-bert")
"""`general.architecture` of encoders."""
UNKNOWN, CONTROL = 2, 3
"""Kinds of tokens."""
_UNNAMED = {"unknown": 0, "bos": 1, "eos": 2}
"""Token -> its default id in a SentencePiece vocabulary, as in llama.cpp."""


def is_encoder(gguf: Gguf) -> bool:
    """Return whether a file holds an encoder."""
    name = gguf.metadata.get("general.architecture")
    return isinstance(name, str) and name in ENCODERS


def check_tokens(gguf: Gguf) -> tuple[int, int]:
    """Return the ids that begin and end a text of an encoder; raise `ModelFileError` if the file does not name them."""
    fields, count = gguf.fields, len(gguf.metadata.get("tokenizer.ggml.tokens") or ())
    found = []
    for names in (("cls", "bos"), ("seperator", "eos")):  # the format's spelling
        ids = [i for name in names for i in fields.ids(f"tokenizer.ggml.{name}_token_id", count)]
        if not ids:
            raise ModelFileError(f"{gguf.paths[0]}: does not name the tokens that begin and end a text")
        found.append(ids[0])
    return found[0], found[1]


def named_ids(gguf: Gguf, name: str, vocab: int, *, absent: bool = False) -> tuple[int, ...]:
    """Return the ids of a special token such as "bos": from the file, else the default of its kind of vocabulary.

    `absent` as in `Fields.ids`.
    """
    key, usual = f"tokenizer.ggml.{name}_token_id", _UNNAMED.get(name)
    if gguf.fields.has(key) or usual is None or gguf.fields.text("tokenizer.ggml.model", "") != "llama":
        return gguf.fields.ids(key, vocab, absent=absent)
    tokens, kinds = gguf.metadata.get("tokenizer.ggml.tokens"), gguf.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or usual >= min(len(tokens), vocab):
        return ()
    if not isinstance(kinds, np.ndarray):
        return (usual,) if is_spelt_as_control(tokens[usual]) else ()
    return (usual,) if usual < len(kinds) and kinds[usual] in (UNKNOWN, CONTROL) else ()
