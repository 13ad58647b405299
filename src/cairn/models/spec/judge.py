"""Decoders that judge pairs of texts: those prompted with Qwen3-Reranker's template that answer "yes" or "no".

A folder is marked by a LogitScore module of sentence-transformers, a GGUF file by the pooling type ranking. The first
folders of Qwen3-Reranker are recognised by their name alone, as in llama.cpp's converter. The option `kind` marks any
model.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from cairn.models.files import MAX_TOKENIZER_BYTES, is_gguf, read_small
from cairn.models.gguf.reader import read_gguf
from cairn.types.errors import ModelError, ModelFileError
from cairn.types.model_spec import JudgeSpec, ModelSpec

FAMILY = "Qwen3ForCausalLM"
_NAME = "qwen3-reranker"
_YES, _NO = "yes", "no"


class _TokenIds(msgspec.Struct):
    vocab: dict[str, int]


class _TokenizerFile(msgspec.Struct):
    """Part of tokenizer.json that maps tokens to ids."""

    model: _TokenIds


def with_judge(spec: ModelSpec, folder: Path, kind: str = "auto") -> ModelSpec:
    """Return the spec as a judge's if the model's name or `kind` "rerank" says so; otherwise unchanged.

    Raise `ModelError` for a model that cannot judge.
    """
    if spec.judge is not None and spec.architecture != FAMILY:
        raise ModelError(f"{folder}: judging by two tokens is supported for {FAMILY}, not for {spec.architecture}")
    named = spec.kind == "chat" and spec.architecture == FAMILY and _NAME in spec.name.lower()
    if spec.kind == "rerank" or not (named or kind == "rerank"):
        return spec
    if spec.architecture != FAMILY or spec.kind != "chat":
        raise ModelError(f"kind is rerank, but {spec.name} is no model that can judge; a decoder must be {FAMILY}")
    yes, no = _ids(folder)
    if max(yes, no) >= spec.vocab:
        raise ModelFileError(
            f"{folder}: the tokens {_YES!r} and {_NO!r} have the ids {yes} and {no}, but the model has "
            f"{spec.vocab} tokens"
        )
    return msgspec.structs.replace(spec, kind="rerank", judge=JudgeSpec(yes=yes, no=no))


def _ids(folder: Path) -> tuple[int, int]:
    if is_gguf(folder):
        tokens = read_gguf(folder).metadata.get("tokenizer.ggml.tokens")
        known = {token: i for i, token in enumerate(tokens) if token in (_YES, _NO)} if isinstance(tokens, list) else {}
    else:
        path = folder / "tokenizer.json"
        try:
            known = msgspec.json.decode(
                read_small(path, MAX_TOKENIZER_BYTES, "tokenizer.json"), type=_TokenizerFile
            ).model.vocab
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ModelFileError(f"{path}: not a tokenizer.json of the tokenizers library ({error})") from error
    if _YES not in known or _NO not in known:
        raise ModelError(f"{folder}: its tokenizer lacks the tokens {_YES!r} and {_NO!r}, which a decoder judges with")
    return known[_YES], known[_NO]
