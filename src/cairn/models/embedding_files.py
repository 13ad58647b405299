"""How a model's folder says that it makes embeddings, and how: modules.json and what it names.

The files are sentence-transformers' (https://sbert.net, "Structure of Sentence Transformer Models"). What the modules
behind the transformer would change of a vector and is not built is refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cairn.errors import ModelError, ModelFileError
from cairn.models.families import MODULES
from cairn.models.files import MAX_JSON_BYTES, Fields, read_json, read_optional_json, read_small
from cairn.types import MAX_CONTEXT, Embedding, Pooling

MAX_PROMPTS = 64
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NAMES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last", "last": "last"}
_KNOWN = ("Transformer", "Pooling", "Normalize")


def embedding_of(folder: Path) -> Embedding | None:
    """What a folder says of embeddings; None where it says nothing of them."""
    path = folder / MODULES
    if not path.exists():
        return None
    pooling: Pooling | None = None
    for kind, place in _modules(path):
        if kind not in _KNOWN:
            raise ModelError(f"{path}: the module {kind[:80]!r} is not supported; supported are {', '.join(_KNOWN)}")
        if kind == "Transformer" and place not in ("", "."):
            raise ModelError(f"{path}: the transformer is in {place[:80]!r}; it must be in the folder itself")
        if kind == "Pooling":
            pooling = _pooling(folder / place / "config.json")
    if pooling is None:
        raise ModelError(f"{path}: names no Pooling: vectors of single tokens are not supported")
    where = folder / "sentence_bert_config.json"
    fields = Fields(read_optional_json(where), where)
    longest = fields.integer("max_seq_length", 1, MAX_CONTEXT) if fields.has("max_seq_length") else None
    prompts, prompt = _prompts(folder / "config_sentence_transformers.json")
    return Embedding(pooling=pooling, max_tokens=longest, prompts=prompts, prompt=prompt)


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """The words that stand before texts, by name, and the name of those that always do."""
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
    """The last part of each module's type, and its folder: a plain name."""
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


def _pooling(path: Path) -> Pooling:
    fields = Fields(read_json(path), path)
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
