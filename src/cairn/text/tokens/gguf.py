"""The tokenizer and the chat templates inside a GGUF file.

The file holds the vocabulary (texts, kinds, scores or merges) and the name of the split that precedes merging. From
these the model's original tokenizer is rebuilt, as far as the file allows (see `_sentencepiece`). Vocabulary and merges
are passed to the library directly: through a tokenizer.json, 150,000 of each would take twice as long.

    gpt2    byte-level BPE: merges are listed; `tokenizer.ggml.pre` names the split
    llama   SentencePiece BPE with byte fallback: pieces with scores, from which the merges follow
    gemma4  the same with listed merges and no space before a text
    bert    WordPiece (encoders): the longest piece first
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, WordPiece
from tokenizers.processors import TemplateProcessing

from cairn.models.families.end_tokens import UNMISTAKABLE, Middle, is_spelt_as_control
from cairn.models.gguf.reader import Gguf
from cairn.models.gguf.vocabulary import check_tokens, is_encoder, named_ids
from cairn.text.tokens.detokenizer import BYTE_TOKEN
from cairn.text.tokens.tokenizer_checks import check_added
from cairn.types.errors import ModelError, ModelFileError
from cairn.types.model_spec import MAX_VOCAB

BEGINS = "\u2581"
_GOES_ON = "##"


def wordpiece_spelling(token: str, control: bool) -> str:
    """Return a WordPiece token in the spelling of tokenizer.json."""
    if control or not token:
        return token
    return token[1:] if token.startswith(BEGINS) and len(token) > 1 else _GOES_ON + token


def wordpiece(gguf: Gguf, tokens: list[str], vocab: dict[str, int]) -> tuple[WordPiece, dict[str, Any]]:
    """Return the WordPiece model of `tokens` and the other parts of its tokenizer.json. Raises ModelFileError."""
    unknown = [tokens[i] for i in named_ids(gguf, "unknown", len(tokens), absent=True)]
    unknown += [token for token in ("[UNK]", "<unk>") if token in vocab]
    if not unknown:
        raise ModelFileError(f"{gguf.paths[0]}: does not name an unknown token")
    small = not any(one.isupper() for token in tokens if not token.startswith("[") for one in token)
    return WordPiece(vocab, unk_token=unknown[0], max_input_chars_per_word=100), {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": small,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": _GOES_ON, "cleanup": True},
    }


def surround(library: Tokenizer, gguf: Gguf, tokens: list[str]) -> None:
    """Set the post-processor of an encoder: one token before the text, one after each text of a pair.

    With BERT the second text has token type 1.
    """
    begin, end = check_tokens(gguf)
    kind = int(gguf.metadata["general.architecture"] == "bert")
    library.post_processor = TemplateProcessing(
        single=f"{tokens[begin]} $A {tokens[end]}",
        pair=f"{tokens[begin]} $A {tokens[end]} $B:{kind} {tokens[end]}:{kind}",
        special_tokens=[(tokens[begin], begin), (tokens[end], end)],
    )


PLAIN, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token kinds, as numbered by `tokenizer.ggml.token_type`."""
ADDED = frozenset((UNKNOWN, CONTROL, USER))
"""Kinds of added tokens, which are recognised before a text is split."""

_WRITTEN = re.compile(r"<[^\s<>'\"]{1,64}>|\[[^\s\[\]'\"]{1,64}\]")
"""Possible control tokens in a template's source."""

MAX_PIECE = 1024
"""Most characters of a SentencePiece piece; published models have at most some hundred."""
MAX_MERGED = 1 << 24
"""Most characters of all derived SentencePiece merges: a few long pieces could otherwise take unbounded memory. Llama
2's 32,000 tokens have 61,249 merges of 329,061 characters, Gemma's 262,144 have 514,906 of 3,117,918."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARKED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = rf"{_LETTERS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~]"
_SIGNS = (
    rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(*patterns: str) -> list[dict[str, Any]]:
    """Return pre-tokenizers that split by each pattern in turn, then map bytes to characters."""
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return [*splits, _byte_level(regex=False)]


def _byte_level(*, regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": regex}


_LLAMA3 = _split(rf"{_LETTERS}|\p{{N}}{{1,3}}{_TAIL}")
_QWEN2 = _split(rf"{_LETTERS}|\p{{N}}{_TAIL}")
_DEEPSEEK3 = _split(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _SIGNS)
_DIGITS = [{"type": "Digits", "individual_digits": True}, _byte_level(regex=True)]

SPLITS: dict[str, list[dict[str, Any]]] = {
    **{name: [_byte_level(regex=True)] for name in ("gpt-2", "phi-2", "olmo")},
    "exaone4": [_byte_level(regex=True)],
    "modern-bert": [_byte_level(regex=True)],
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "pixtral": _LLAMA3,
    "lfm2": _LLAMA3,
    "glm4": _LLAMA3,
    "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "gpt-4o": _split(_CASED),
    "llama4": _split(_CASED),
    "qwen35": _split(_MARKED),
    "seed-coder": _split(_SEED),
    "deepseek-v3": _DEEPSEEK3,
    "hunyuan-dense": _DEEPSEEK3,
    "refact": _DIGITS,
    "qwen2": _QWEN2,
    "stablelm2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "command-r": _DIGITS,
    "tekken": _split(_TEKKEN),
}
"""`tokenizer.ggml.pre` -> pre-tokenizers."""
_BEGINNING = frozenset(("llama-bpe", "llama-v3", "llama3", "pixtral", "lfm2", "tekken"))
"""Splits of models that start a text with BOS unless the file says otherwise."""
WHOLE_WORDS = _BEGINNING | {"glm4"}
"""Splits of models that keep a word that is a token, without applying merges."""
COMPOSED = frozenset(("qwen2", "qwen35", "deepseek-r1-qwen", "modern-bert", "olmo", "stablelm2", "command-r"))
"""Splits of models that normalise text to NFC."""

NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # the format's spelling
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}


def load_tokenizer(gguf: Gguf) -> tuple[Tokenizer, dict[str, Any], dict[str, Any]]:
    """Rebuild the tokenizer of a file; return it with the decoder and settings of tokenizer(_config).json.

    Raises `ModelFileError` for a broken vocabulary, `ModelError` naming an unsupported kind of tokenizer or split.
    """
    fields = gguf.fields
    tokens, kinds = _vocabulary(gguf)
    check_added(sum(kind in ADDED for kind in kinds), gguf.paths[0])  # before they take memory
    model = fields.text("tokenizer.ggml.model", "")
    if model == "gpt2":
        bpe: Any
        bpe, around = _byte_bpe(gguf, tokens, kinds)
        bos = fields.text("tokenizer.ggml.pre", "") in _BEGINNING
    elif model == "llama":
        bpe, around = _sentencepiece(gguf, tokens, kinds)
        bos = True
    elif model == "bert":
        tokens = [wordpiece_spelling(token, kind in ADDED) for token, kind in zip(tokens, kinds, strict=True)]
        bpe, around = wordpiece(gguf, tokens, _ranked(gguf, tokens, kinds))
        bos = False
    elif model == "gemma4":
        bpe, around = _spaced_bpe(gguf, tokens, kinds)
        bos = True
    else:
        raise ModelError(
            f"{gguf.paths[0]}: the tokenizer {model[:80]!r} is not supported; supported are bert, gemma4, gpt2, llama"
        )
    encodes = is_encoder(gguf)
    config: dict[str, Any] = {"add_bos_token": not encodes and fields.flag("tokenizer.ggml.add_bos_token", bos)}
    if fields.flag("tokenizer.ggml.add_eos_token", False) and not encodes:
        config["add_eos_token"] = True  # after whole texts
    for name, key in NAMES.items():
        for i in named_ids(gguf, key, len(tokens), absent=name != "eos_token")[:1]:
            config[name] = tokens[i]
    empty: dict[str, Any] = {
        "model": {"type": "BPE", "vocab": {}, "merges": []},
        "added_tokens": [],
        "post_processor": None,
    }
    rebuilt = Tokenizer.from_str(json.dumps({"version": "1.0", **around, **empty}))
    rebuilt.model = bpe
    added = _added(tokens, kinds, _mistaken(gguf, tokens, kinds, config))
    check_added(len(added), gguf.paths[0])
    rebuilt.add_tokens(added)
    if encodes:
        surround(rebuilt, gguf, tokens)
    return rebuilt, around["decoder"], config


def named_middle(gguf: Gguf) -> Middle | None:
    """Return the fill-in-the-middle tokens that a file names; None if it lacks one."""
    tokens = gguf.metadata["tokenizer.ggml.tokens"]
    for names in (("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")):
        found = [i for name in names for i in named_ids(gguf, name, len(tokens), absent=True)[:1]]
        if len(found) == len(names):
            return Middle(*found)
    return None


def named_tokens(gguf: Gguf, text_of: Callable[[int], str | None]) -> dict[str, Any]:
    """Return the special tokens that a file names by id, as tokenizer_config.json, for a tokenizer from elsewhere."""
    config: dict[str, Any] = {}
    if gguf.fields.has("tokenizer.ggml.add_bos_token"):
        config["add_bos_token"] = gguf.fields.flag("tokenizer.ggml.add_bos_token", False)
    for name, key in NAMES.items():
        for i in named_ids(gguf, key, MAX_VOCAB, absent=True):
            if (text := text_of(i)) is not None:
                config[name] = text
    return config


def load_templates(gguf: Gguf) -> dict[str, str]:
    """Return the chat templates in a file by name."""
    prefix = "tokenizer.chat_template"
    found = {}
    for key in gguf.metadata:
        if key == prefix or key.startswith(prefix + "."):
            name = key[len(prefix) + 1 :] or "default"
            found[name] = gguf.fields.text(key, "")
    return {name: text for name, text in found.items() if text}


def _vocabulary(gguf: Gguf) -> tuple[list[str], list[int]]:
    """Return the texts and kinds of all tokens; kinds that the file lacks are derived from the texts."""
    path = gguf.paths[0]
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(one, str) for one in tokens):
        raise ModelFileError(f"{path}: tokenizer.ggml.tokens must be a list of texts")
    if "tokenizer.ggml.token_type" not in gguf.metadata:
        unknown = set(named_ids(gguf, "unknown", len(tokens), absent=True))
        bytes_too = gguf.fields.text("tokenizer.ggml.model", "") == "llama"
        return tokens, [
            UNKNOWN if i in unknown else BYTE if bytes_too and BYTE_TOKEN.fullmatch(token) else PLAIN
            for i, token in enumerate(tokens)
        ]
    return tokens, [int(one) for one in _numbers(gguf, "tokenizer.ggml.token_type", len(tokens), "iu", "whole numbers")]


def _numbers(gguf: Gguf, key: str, count: int, types: str, what: str) -> list[float]:
    """Return the `count` finite numbers of a key; `types` are numpy's kind letters. Raises ModelFileError."""
    values = gguf.metadata.get(key)
    listable = isinstance(values, np.ndarray) and values.shape == (count,) and values.dtype.kind in types
    if values is None or not listable or not np.isfinite(values).all():
        raise ModelFileError(f"{gguf.paths[0]}: {key} must be a list of {count} {what}")
    listed: list[float] = values.tolist()
    return listed


def _ranked(gguf: Gguf, tokens: list[str], kinds: list[int]) -> dict[str, int]:
    """Return text -> id. Padding entries are left out, so their ids are unknown."""
    found: dict[str, int] = {}
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if token and (kind != UNUSED or token in UNMISTAKABLE):
            found.setdefault(token, number)
    if not found:
        raise ModelFileError(f"{gguf.paths[0]}: tokenizer.ggml.tokens has no token that text can use")
    return found


def _added(tokens: list[str], kinds: list[int], mistaken: set[str]) -> list[AddedToken]:
    """Return the added tokens; `mistaken` are control tokens that the file gives another kind."""
    return [
        AddedToken(token, normalized=False, special=kind != USER or token in mistaken)
        for token, kind in zip(tokens, kinds, strict=True)
        if token and (kind in ADDED or token in mistaken)
    ]


def _mistaken(gguf: Gguf, tokens: list[str], kinds: list[int], config: dict[str, Any]) -> set[str]:
    """Return the texts of control tokens that the file gives another kind.

    They are the tokens that it names (`bos_token`, ...), those whose text is known to end a turn, and those that its
    chat templates write. A token that merges can produce is ordinary text, even if a template writes it.
    """
    written = {text for template in load_templates(gguf).values() for text in _WRITTEN.findall(template)}
    wanted = {text for text in config.values() if isinstance(text, str) and is_spelt_as_control(text)}
    suspects = {
        token
        for token, kind in zip(tokens, kinds, strict=True)
        if kind != CONTROL
        and (token in UNMISTAKABLE or token in wanted or (kind not in (USER, UNKNOWN) and token in written))
    }
    named = suspects & (UNMISTAKABLE | wanted)
    merges = gguf.metadata.get("tokenizer.ggml.merges")
    if named != suspects and isinstance(merges, list):
        return named | (suspects - {merge.replace(" ", "", 1) for merge in merges if isinstance(merge, str)})
    return named | {token for token in suspects if token.startswith(("<|", "<\uff5c"))}


def _byte_bpe(gguf: Gguf, tokens: list[str], kinds: list[int]) -> tuple[BPE, dict[str, Any]]:
    """Return the byte-level BPE model and the other parts of its tokenizer.json."""
    path, named = gguf.paths[0], gguf.fields.text("tokenizer.ggml.pre", "")
    if not named:
        raise ModelError(
            f"{path}: does not say how text is split (tokenizer.ggml.pre), so it would be encoded wrongly; "
            "such files are from before April 2024, get a newer one"
        )
    if named not in SPLITS:
        known = ", ".join(sorted(SPLITS))
        raise ModelError(f"{path}: the tokenizer's split {named[:80]!r} is not supported; supported are {known}")
    return _merged(gguf, _ranked(gguf, tokens, kinds), ignore_merges=named in WHOLE_WORDS), {
        "normalizer": {"type": "NFC"} if named in COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS[named]},
        "decoder": _byte_level(regex=True),
    }


def _merged(gguf: Gguf, vocab: dict[str, int], **options: Any) -> BPE:
    """Return the BPE model of the merges that a file lists. Raises ModelFileError."""
    path, listed = gguf.paths[0], gguf.metadata.get("tokenizer.ggml.merges")
    if not isinstance(listed, list):
        raise ModelFileError(f"{path}: tokenizer.ggml.merges must be a list of texts")
    listed = list(dict.fromkeys(listed))  # of equal merges the first counts, as in llama.cpp
    try:
        # Spaces inside tokens are written as another character, so a space only separates the two tokens.
        pairs = [tuple(merge.split(" ")) for merge in listed]
        try:
            return BPE(vocab, pairs, **options)
        except Exception:
            # Merges of unknown tokens, or to one, could never apply: leave them out.
            pairs = [pair for pair in pairs if len(pair) != 2 or {*pair, "".join(pair)} <= vocab.keys()]
            return BPE(vocab, pairs, **options)
    except Exception as error:  # the library raises bare Exception
        raise _bad_merge(path, listed) from error


def _spaced_bpe(gguf: Gguf, tokens: list[str], kinds: list[int]) -> tuple[BPE, dict[str, Any]]:
    """Return a BPE model with byte fallback and the other parts of its tokenizer.json.

    Spaces are written as "\u2581", and a text is merged as a whole, without a split.
    """
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN and token), None)
    options = {"unk_token": unknown, "byte_fallback": True, "fuse_unk": True}
    return _merged(gguf, _ranked(gguf, tokens, kinds), **options), {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
    }


def _bad_merge(path: Path, merges: list[Any]) -> ModelFileError:
    """Return the error for the first invalid merge."""
    found = next((one for one in merges if not isinstance(one, str) or len(one.split(" ")) != 2), None)
    return ModelFileError(f"{path}: tokenizer.ggml.merges must hold pairs of tokens, found {found!r:.80}")


def _sentencepiece(gguf: Gguf, tokens: list[str], kinds: list[int]) -> tuple[BPE, dict[str, Any]]:
    """Return the BPE model and the other parts of its tokenizer.json.

    A file does not say whether the model was trained with "▁" before a whole text only, or after control tokens too.
    It is put in both places, as in llama.cpp; a tokenizer.json with "first" has no "▁" after control tokens.
    """
    scores = _numbers(gguf, "tokenizer.ggml.scores", len(tokens), "iuf", "finite numbers")
    vocab = _ranked(gguf, tokens, kinds)
    plain = {token: vocab[token] for token in vocab if kinds[vocab[token]] not in (UNKNOWN, CONTROL, USER, BYTE)}
    long = next((token for token in plain if len(token) > MAX_PIECE), None)
    if long is not None:
        raise ModelFileError(f"{gguf.paths[0]}: a token has {len(long)} characters, more than {MAX_PIECE}")
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN and token), None)
    prefix = gguf.fields.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = BPE(vocab, _merges(plain, scores, gguf.paths[0]), unk_token=unknown, byte_fallback=True, fuse_unk=True)
    return model, {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if prefix else []), spaces],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
    }


def _merges(vocab: dict[str, int], scores: list[float], path: Path) -> list[tuple[str, str]]:
    """Return every pair of pieces that joins to a third, ordered by the score of the third, best first.

    Raises `ModelFileError` above `MAX_MERGED` characters.
    """
    found: list[tuple[float, int, int, int, str, str]] = []
    own, characters = {piece: piece for piece in vocab}, 0
    for piece, number in vocab.items():
        score = -scores[number]
        for cut in range(1, len(piece)):
            # The vocabulary's own string objects: keeping the slices would take more memory.
            if (left := own.get(piece[:cut])) is None or (right := own.get(piece[cut:])) is None:
                continue
            characters += len(piece)
            if characters > MAX_MERGED:
                raise ModelFileError(f"{path}: the merges of its tokens have more than {MAX_MERGED} characters")
            # With equal scores the longer left part comes first, as in the converters of these models.
            found.append((score, -cut, cut - len(piece), number, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
