"""A folder's tokenizer and chat templates -> GGUF metadata; the inverse of `gguf`.

GGUF stores only the name of a split, so `check_same` compares the written tokenizer with the folder's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cairn.models.files import read_json
from cairn.text.chat.templates import load_templates
from cairn.text.tokens.gguf import BYTE, COMPOSED, CONTROL, NAMES, PLAIN, SPLITS, UNKNOWN, UNUSED, USER, WHOLE_WORDS
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import ModelError, ModelFileError

_SAMPLES = (
    "Hello, world! I'm 31 years old; it's 12:45. You'LL see",
    "  two spaces,   three\tand a tab\n\nnew lines \r\n end  ",
    "def f(x): return {'a': [1, 22, 333, 4444], \"b\": x**2}  # 100%",
    "naïve café — Größe, ÀÉÎ, e\u0301, Ünïcödé, ﬁ, Ⅷ, ½, ²",
    "こんにちは世界。你好,世界!안녕하세요 Привет мир שלום عالم नमस्ते ไทย",
    "😀👩‍👩‍👧‍👦🇩🇪 \u200b\ufeff\u00a0\u3000 ▁ _ \x00\x7f",
    "camelCase HTTPServer snake_case kebab-case https://example.org/a?b=c&d=e#f",
    "",
    " ",
    "a",
)


def texts_of(folder: Path, vocab: int, eos_ids: tuple[int, ...]) -> dict[str, Any]:
    """Return the tokenizer and templates of a folder with safetensors as GGUF metadata.

    `vocab` is the number of embedding rows, `eos_ids` the tokens that end an answer. Raises `ModelError` for a
    tokenizer that GGUF cannot name, `ModelFileError` for a broken one.
    """
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.load(folder)
    data = read_json(path)
    try:
        found = _vocabulary(data, vocab, path)
    except (KeyError, TypeError, AttributeError):
        raise ModelFileError(f"{path}: not a tokenizer.json of the tokenizers library") from None
    for name, key in NAMES.items():
        number = tokenizer.token_id(tokenizer.special_tokens.get(name, ""))
        if number is not None:
            found[f"tokenizer.ggml.{key}_token_id"] = number
    ends = list(dict.fromkeys([*(one for one in (tokenizer.eos_id,) if one is not None), *eos_ids]))
    found |= {f"tokenizer.ggml.{key}_token_id": one for key, one in zip(("eos", "eot", "eom"), ends, strict=False)}
    if len(ends) > 3:
        found["tokenizer.ggml.eos_token_ids"] = ends
    found["tokenizer.ggml.add_bos_token"] = tokenizer.encode_prompt("a") != tokenizer.encode("a")
    for name, text in load_templates(folder).items():
        found["tokenizer.chat_template" + ("" if name == "default" else f".{name}")] = text
    return found


def check_same(folder: Path, written: Path) -> None:
    """Raise `ModelError` if the tokenizer or the templates of a GGUF file differ from the folder's."""
    ours, theirs = Tokenizer.load(folder), Tokenizer.load(written)
    samples = [*_SAMPLES, " ".join(_SAMPLES), *(f"a {text} b{text}" for text in ours.special_tokens.values())]
    for text in [*samples, *(f"{control}x {control}\n{control}" for control in ours.controls.ids)]:
        ids = ours.encode(text, special=True)
        same = (
            ids == theirs.encode(text, special=True)
            and ours.encode_prompt(text) == theirs.encode_prompt(text)
            and ours.encode_rendered(text) == theirs.encode_rendered(text)
            and ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special=False)
            and ours.decode(ids) == theirs.decode(ids)
        )
        if not same:
            raise ModelError(f"{folder}: its tokenizer cannot be written as GGUF; there {text[:60]!r} has other tokens")
    if load_templates(folder) != load_templates(written):
        raise ModelError(f"{folder}: its chat templates cannot be written as GGUF")


def _vocabulary(data: dict[str, Any], vocab: int, path: Path) -> dict[str, Any]:
    model, added = data["model"], {one["id"]: one for one in data.get("added_tokens") or []}
    if model.get("type", "BPE") != "BPE":
        raise ModelError(f"{path}: the tokenizer {model['type']!r:.80} cannot be written as GGUF; BPE ones can")
    texts = {number: text for text, number in model["vocab"].items()} | {i: one["content"] for i, one in added.items()}
    if max(texts, default=0) >= vocab:
        raise ModelFileError(f"{path}: has the token id {max(texts)}, but the embedding has {vocab} rows")
    kinds = [PLAIN if number in texts else UNUSED for number in range(vocab)]
    for number, one in added.items():
        kinds[number] = CONTROL if one["special"] else USER
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(vocab)]
    found: dict[str, Any] = {"tokenizer.ggml.tokens": tokens}
    if model.get("byte_fallback"):
        rank = {merge.replace(" ", "", 1): place for place, merge in reversed(list(enumerate(merges)))}
        kinds = [BYTE if _is_byte(text) else kind for text, kind in zip(tokens, kinds, strict=True)]
        if model.get("unk_token") in model["vocab"]:
            kinds[model["vocab"][model["unk_token"]]] = UNKNOWN
        found["tokenizer.ggml.model"] = "llama"
        found["tokenizer.ggml.scores"] = [-float(rank.get(text, len(merges))) for text in tokens]
        found["tokenizer.ggml.add_space_prefix"] = "Prepend" in str(data.get("normalizer"))
    else:
        found |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _split_name(data, path)}
        found["tokenizer.ggml.merges"] = merges
    return found | {"tokenizer.ggml.token_type": kinds}


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _split_name(data: dict[str, Any], path: Path) -> str:
    """Return GGUF's name for the split of a byte-level tokenizer. Raises ModelError if it has none."""
    wanted, composed = _steps(data["pre_tokenizer"]), data.get("normalizer") is not None
    whole = bool(data["model"].get("ignore_merges"))
    for name, steps in SPLITS.items():
        alike = (name in COMPOSED, name in WHOLE_WORDS) == (composed, whole)
        if alike and _steps({"type": "Sequence", "pretokenizers": steps}) == wanted:
            return name
    raise ModelError(
        f"{path}: how this tokenizer splits text has no name in GGUF, so it cannot be written; those that have one are "
        f"{', '.join(SPLITS)}"
    )


def _steps(splitter: Any) -> list[Any]:
    """Return the steps of a pre-tokenizer without options that do not change the tokens."""
    if not isinstance(splitter, dict):
        return []
    if splitter["type"] == "Sequence":
        return [step for one in splitter["pretokenizers"] for step in _steps(one)]
    return [{name: value for name, value in splitter.items() if name != "trim_offsets"}]
