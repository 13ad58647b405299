"""Embedding settings in a model's folder: modules.json and the files it names.

The files are sentence-transformers' (https://sbert.net, "Structure of Sentence Transformer Models"). An unsupported
module or option that would change a vector is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from cairn.models.files import (
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    MODULES,
    Fields,
    parse_object,
    read_json,
    read_optional_json,
    read_small,
)
from cairn.types.errors import ModelError, ModelFileError
from cairn.types.model_spec import MAX_CONTEXT, MAX_VOCAB, Dense, Embedding, JudgeSpec, Pooling

MAX_PROMPTS = 64
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NAMES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last", "last": "last"}
_KNOWN = ("Transformer", "Pooling", "Dense", "Normalize")
_ACTIVATIONS: dict[str, Literal["", "tanh"]] = {"Identity": "", "Tanh": "tanh"}
_SCORE = "LogitScore"
"""Module of a decoder that judges pairs."""


def embedding_of(folder: Path) -> Embedding | None:
    """Return a folder's embedding settings; None if it has none or its model judges pairs."""
    path = folder / MODULES
    if not path.exists():
        return None
    modules = _modules(path)
    kinds = [kind for kind, _ in modules]
    unknown = next((kind for kind in kinds if kind not in _KNOWN), None)
    if unknown is not None and not _judges(kinds):
        raise ModelError(f"{path}: the module {unknown[:80]!r} is not supported; supported are {', '.join(_KNOWN)}")
    if modules and (place := modules[0][1]) not in ("", "."):
        raise ModelError(f"{path}: the transformer is in {place[:80]!r}; it must be in the folder itself")
    if _judges(kinds):
        return None
    if kinds.count("Pooling") != 1:
        raise ModelError(f"{path}: names no Pooling: vectors of single tokens are not supported")
    if kinds != sorted(kinds, key=_KNOWN.index) or kinds.count("Transformer") != 1:
        raise ModelError(f"{path}: the modules {', '.join(kinds)[:200]} must be in the order {', '.join(_KNOWN)}")
    prompts, prompt = _prompts(folder / "config_sentence_transformers.json")
    return Embedding(
        pooling=_pooling(folder / modules[1][1] / "config.json", bool(prompts)),
        max_tokens=_longest(folder),
        prompts=prompts,
        prompt=prompt,
        dense=tuple(_dense(folder, place) for kind, place in modules if kind == "Dense"),
    )


def _longest(folder: Path) -> int | None:
    """Return the most tokens of a text; None if sentence_bert_config.json does not say."""
    path = folder / "sentence_bert_config.json"
    fields = Fields(read_optional_json(path), path)
    if fields.flag("do_lower_case", False) and not _lowercases(folder / "tokenizer.json"):
        raise ModelError(f"{path}: do_lower_case is not supported where tokenizer.json does not lowercase by itself")
    return fields.integer("max_seq_length", 1, MAX_CONTEXT) if fields.has("max_seq_length") else None


class _Tokenizer(msgspec.Struct):
    """The part of a tokenizer.json that may lowercase; the others may be too large for `read_json`."""

    normalizer: msgspec.Raw = msgspec.Raw(b"null")


def _lowercases(path: Path) -> bool:
    """Return whether a tokenizer.json lowercases every text."""
    try:
        part = bytes(msgspec.json.decode(read_small(path, MAX_TOKENIZER_BYTES, path.name), type=_Tokenizer).normalizer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError(f"{path}: not a tokenizer.json of the tokenizers library ({error})") from error
    waiting: list[Any] = [] if part == b"null" else [parse_object(part, path)]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, dict):
            continue
        kind, parts = step.get("type"), step.get("normalizers")
        if kind == "Lowercase" or (kind == "BertNormalizer" and step.get("lowercase") is True):
            return True
        waiting += parts if isinstance(parts, list) else []
    return False


def judge_of(folder: Path) -> JudgeSpec | None:
    """Return the two tokens that a folder's model judges with; None if it does not judge."""
    path = folder / MODULES
    modules = _modules(path) if path.exists() else []
    if not _judges([kind for kind, _ in modules]):
        return None
    where = folder / modules[1][1] / "config.json"
    fields = Fields(read_json(where), where)
    if not fields.has("false_token_id"):
        raise ModelError(f"{where}: a score without false_token_id is not supported")
    yes, no = (fields.integer(f"{name}_token_id", 0, MAX_VOCAB - 1) for name in ("true", "false"))
    return JudgeSpec(yes=yes, no=no)


def _judges(kinds: list[str]) -> bool:
    return kinds == ["Transformer", _SCORE]


def check_width(embedding: Embedding, hidden: int, folder: Path) -> None:
    """Raise `ModelFileError` if a matrix's input size differs from the output size of what precedes it."""
    width = hidden
    for dense in embedding.dense:
        if dense.inputs != width:
            where = folder / dense.place / "config.json"
            raise ModelFileError(f"{where}: in_features must be {width}, the size of its input, found {dense.inputs}")
        width = dense.outputs


def _dense(folder: Path, place: str) -> Dense:
    path = folder / place / "config.json"
    fields = Fields(read_json(path), path)
    named = fields.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if named not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelError(f"{path}: activation_function {named[:80]!r} is not supported; supported are {known}")
    for name in ("module_input_name", "module_output_name"):
        if fields.text(name, "sentence_embedding") != "sentence_embedding":
            raise ModelError(f"{path}: {name} other than sentence_embedding is not supported")
    return Dense(
        place=place,
        inputs=fields.integer("in_features", 1, 1 << 20),
        outputs=fields.integer("out_features", 1, 1 << 20),
        bias=fields.flag("bias", True),
        activation=_ACTIVATIONS[named],
    )


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default prompt."""
    fields = Fields(read_optional_json(path), path)
    listed = fields.object("prompts")
    if len(listed.values) > MAX_PROMPTS:
        raise fields.error("prompts", f"an object of at most {MAX_PROMPTS} texts")
    prompts = {name: listed.text(name, "") for name in listed.values}
    name = fields.text("default_prompt_name", "") or None
    if name is not None and name not in prompts:
        raise fields.error("default_prompt_name", "one of the names in prompts")
    return prompts, name


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return the last part of each module's type, and the name of its folder."""
    try:
        listed: Any = json.loads(read_small(path, MAX_JSON_BYTES, "JSON file"))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not valid JSON ({type(error).__name__}: {str(error)[:120]})") from None
    if not isinstance(listed, list) or len(listed) > 16 or not all(isinstance(one, dict) for one in listed):
        raise ModelFileError(f"{path}: expected a list of at most 16 modules")
    found = []
    for number, one in enumerate(listed):
        fields = Fields(one, path, f"[{number}].")
        place = fields.text("path", "")
        if "/" in place or "\\" in place or place == "..":
            raise fields.error("path", "the name of a folder")
        found.append((fields.text("type", "").rpartition(".")[2], place))
    return found


def _pooling(path: Path, prompted: bool) -> Pooling:
    """Return the pooling. `prompted`: the model has prompts that may precede a text."""
    fields = Fields(read_json(path), path)
    if prompted and not fields.flag("include_prompt", True):
        raise ModelError(f"{path}: include_prompt is false, which is not supported beside prompts")
    if fields.has("pooling_mode"):
        names = fields.values["pooling_mode"]
        modes = [names] if isinstance(names, str) else names
        if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _NAMES:
            raise ModelError(f"{path}: pooling_mode must be one of {', '.join(_NAMES)}, found {str(names)[:80]!r}")
        return _NAMES[modes[0]]
    wanted = [name for name in fields.values if name.startswith("pooling_mode_") and fields.flag(name, False)]
    if len(wanted) != 1 or wanted[0] not in _MODES:
        raise ModelError(f"{path}: one of {', '.join(_MODES)} must be true, found {', '.join(wanted)[:200] or 'none'}")
    return _MODES[wanted[0]]
