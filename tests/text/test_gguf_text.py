"""Tokenizers in GGUF files: the same ids and text as the tokenizer that the model came with."""

# ruff: noqa: RUF001  (odd characters are the point)

from __future__ import annotations

import functools
import itertools
import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from cairn.text.chat.templates import load_templates
from cairn.text.tokens.gguf import CONTROL, SPLITS, UNKNOWN, _merges
from cairn.text.tokens.tokenizer import Tokenizer as Ours
from cairn.types.errors import InvalidRequest, ModelError, ModelFileError
from tests.gguf_files import write_tokenizer
from tests.text import text_models
from tests.text.text_models import LLAMA2_CONFIG, LLAMA3_CONFIG, QWEN_CONFIG, TEXTS

# As the published tokenizer.json files of Llama 3, Qwen2 and Mistral Nemo write them.
LLAMA3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
QWEN2 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
TEKKEN = (
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
    "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
# As those of GPT-4o, Qwen3.5, Seed-Coder and DeepSeek V3 do.
CASED = (
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
MARKED = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
SEED = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\\r\\n]+|\\s*[\\r\\n]+"
    "|\\s+(?!\\S)|\\s+"
)
DEEPSEEK3 = (
    "\\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
)
WHOLE = {"llama-bpe", "llama3", "llama-v3", "pixtral", "lfm2", "glm4", "tekken"}
# fmt: off
PIECES = [
    "Hello", "world", "the", "THE", "McDonald", "'ll", "'S", "don't", "ß", "ſ", "İ", "Ǆ", "ﬁ", "½", "x²", "٣", "１２",
    "12345", " ", "  ", "\t", "\n", "\r\n", "\n\n ", "\u00a0", "\u3000", "\u200b", "\u2028", "\u0085", "\x0b", "\x00",
    "\ufeff", "        ", "é", "e\u0301", "\u0301", "가", "\u1100\u1161", "Å", "\u212b", "ñ", "n\u0303", "क्षि", "ไทย",
    "עברית", "العربية", "你好", "世界", "こんにちは", "😀", "👨‍👩‍👧", "👍🏽", "🇩🇰", "\U0010fffd", "\ufffd",
    "\ue000", "\u202e", "𝔘𝔫𝔦", "Ω", "Σς", "//", "/", "...", "!?", "()", "{'a': 1}", "==", "_", "-", "—", "„", "#",
    "▁", "Ġ", "Ċ", "<0x41>", "[PAD3]", "<", ">", "s>",
]
# fmt: on


def strings(count: int, seed: int = 3) -> Iterator[str]:
    """Return edge cases joined at random, words of the training texts, and random characters."""
    rng = random.Random(seed)
    words = [word for text in TEXTS for word in text.split(" ")]
    yield from ("", " ", "\n", *PIECES, *TEXTS)
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(1, 12)):
            kind = rng.randrange(8)
            if kind < 4:
                parts.append(rng.choice(PIECES))
            elif kind < 7:
                parts.append(rng.choice(("", " ")) + rng.choice(words))
            else:
                code = rng.choice((rng.randrange(0x250), rng.randrange(0x3000), rng.randrange(0x110000)))
                parts.append("" if 0xD800 <= code < 0xE000 else chr(code))
        yield "".join(parts)


@functools.cache
def published(pre: str) -> str:
    """Return a tokenizer.json of a small byte-level BPE that splits text as models with this `pre` do."""
    made = Tokenizer(models.BPE(ignore_merges=pre in WHOLE))
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    patterns = {
        "qwen2": QWEN2,
        "deepseek-r1-qwen": QWEN2,
        "stablelm2": QWEN2,
        "tekken": TEKKEN,
        "llama-bpe": LLAMA3,
        "llama3": LLAMA3,
        "llama-v3": LLAMA3,
        **dict.fromkeys(("pixtral", "lfm2", "glm4", "dbrx", "smaug-bpe"), LLAMA3),
        **{"gpt-4o": CASED, "llama4": CASED, "qwen35": MARKED, "seed-coder": SEED},
        **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), DEEPSEEK3),
    }
    if pre in patterns:
        every = patterns[pre] if isinstance(patterns[pre], tuple) else (patterns[pre],)
        splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in every]
        made.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
    elif pre in ("smollm", "starcoder", "refact", "command-r"):
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    else:
        made.pre_tokenizer = gpt2
    if pre in ("qwen2", "qwen35", "deepseek-r1-qwen", "modern-bert", "olmo", "stablelm2", "command-r"):
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*TEXTS, *PIECES, " ".join(PIECES)] * 3
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts, trainer)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>"]
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in names])
    made.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>", "        ")])
    data = json.loads(made.to_str())
    # Without the last merges, some words can only be encoded by looking up the whole word (`ignore_merges`).
    data["model"]["merges"] = data["model"]["merges"][:-80]
    return json.dumps(data)


def assert_same(ours: Ours, theirs: Ours, peer: Any, text: str) -> None:
    """Compare ids and text with transformers and with the tokenizer.json that the file was made from."""
    ids = peer.encode(text, add_special_tokens=False)
    assert ours.encode(text, special=True) == ids, text
    assert ours.encode(text) == theirs.encode(text), text
    assert ours.decode(ids) == peer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False), text
    stream = ours.detokenizer()
    assert stream.push(ids) + stream.flush() == ours.decode(ids), text


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_tokenizers_equal_transformers(pre: str, tmp_path: Path, prove: bool) -> None:
    folder = text_models.write_model(tmp_path / "model", published(pre), QWEN_CONFIG)
    ours = Ours.load(write_tokenizer(folder, tmp_path / "m.gguf", pre=pre))
    theirs, peer = Ours.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    controls = ["<|im_start|>user\n", "<|im_end|>", "<think>", "a<|endoftext|>b", "<|eot_id|"]
    fewer = 400 if pre in ("gpt-2", "llama-bpe", "qwen2", "tekken", "smollm") else 100
    for text in [*strings(10_000 if prove else fewer), *(f"{a}x {b}" for a in controls for b in controls)]:
        assert_same(ours, theirs, peer, text)
    assert ours.special_tokens == theirs.special_tokens
    assert ours.special_ids == theirs.special_ids and ours.controls.ids == theirs.controls.ids


def gemma4_tokenizer() -> str:
    """Return a tokenizer.json like Gemma 4's: Llama 2's without the space before a text."""
    data = json.loads(text_models.sentencepiece())
    data["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    data["decoder"]["decoders"] = data["decoder"]["decoders"][:-1]
    return json.dumps(data)


def test_spaced_tokenizers_equal_transformers(tmp_path: Path, prove: bool) -> None:
    """Gemma 4's: merges in the listed order, over whole texts."""
    folder = text_models.write_model(tmp_path / "model", gemma4_tokenizer(), LLAMA2_CONFIG)
    merges = [" ".join(pair) for pair in json.loads(gemma4_tokenizer())["model"]["merges"]]
    extra = {"ggml__model": "gemma4", "ggml__merges": merges, "ggml__scores": None, "ggml__add_space_prefix": False}
    ours = Ours.load(write_tokenizer(folder, tmp_path / "m.gguf", **extra))
    theirs, peer = Ours.load(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for text in [*strings(10_000 if prove else 500), "<s> a", "a</s>b", " x", "  x"]:
        assert_same(ours, theirs, peer, text)
    assert ours.encode_prompt("a")[0] == ours.bos_id


def rescored(folder: Path) -> dict[str, float]:
    """Give the folder's tokenizer.json all merges that its pieces' scores imply, as converters do; return the
    scores.
    """
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    rank = {"".join(pair): number for number, pair in reversed(list(enumerate(data["model"]["merges"])))}
    # Shuffled, so that the order of ids is not the order of scores.
    rank = dict(zip(rank, random.Random(5).sample(sorted(rank.values()), len(rank)), strict=True))
    special = {added_token["content"] for added_token in data["added_tokens"]}
    scores = {piece: -float(rank.get(piece, -1000)) for piece in data["model"]["vocab"] if piece not in special}
    pairs = [(p[:cut], p[cut:]) for p in scores if not p.startswith("<0x") for cut in range(1, len(p))]
    known = [pair for pair in pairs if pair[0] in scores and pair[1] in scores]
    known.sort(key=lambda pair: (scores["".join(pair)], len(pair[0])), reverse=True)
    data["model"]["merges"] = [list(pair) for pair in known]
    (folder / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    return {piece: score for piece, score in scores.items() if not piece.startswith("<0x")}


def sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """Encode by SentencePiece's algorithm: join the best-scoring neighbours, the leftmost first, until none is left."""
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [a + b for a, b in itertools.pairwise(symbols)]
        best = max((scores[piece] for piece in joined if piece in scores), default=None)
        if best is None:
            break
        at = next(n for n, piece in enumerate(joined) if scores.get(piece) == best)
        symbols[at : at + 2] = [joined[at]]
    return [
        token
        for symbol in symbols
        for token in ([symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()])
    ]


def test_sentencepiece_tokenizers_equal_transformers_and_the_algorithm(tmp_path: Path, prove: bool) -> None:
    folder = text_models.write_model(tmp_path / "model", text_models.sentencepiece(), LLAMA2_CONFIG)
    scores = rescored(folder)
    count = len(json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]["vocab"])
    path = write_tokenizer(folder, tmp_path / "m.gguf", ggml__scores=[0.0] * count)
    names = json.loads(json.dumps(Ours.load(folder)._full.get_vocab()))
    listed = [scores.get(token, -1000.0) for token in sorted(names, key=names.__getitem__)]
    ours = Ours.load(write_tokenizer(folder, path, ggml__scores=listed))
    theirs = Ours.load(folder)
    peer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **LLAMA2_CONFIG)
    for text in strings(10_000 if prove else 1_000):
        assert_same(ours, theirs, peer, text)
        if not any(name in text for name in ("<s>", "</s>", "<unk>")):
            assert [peer.convert_ids_to_tokens(i) for i in ours.encode(text)] == sentencepiece(text, scores), text
    assert ours.encode_prompt("a") == theirs.encode_prompt("a")
    assert ours.controls.ids == theirs.controls.ids and ours.special_tokens == theirs.special_tokens


def test_bos_is_put_where_the_model_wants_it(tmp_path: Path) -> None:
    """Known failure 21."""
    folder = text_models.write_model(tmp_path / "model", published("llama-bpe"), LLAMA3_CONFIG)

    def begins(pre: str, **extra: Any) -> bool:
        ours = Ours.load(write_tokenizer(folder, tmp_path / "m.gguf", pre=pre, **extra))
        ids = ours.encode_prompt("x<|begin_of_text|>", special=False)
        assert ours.bos_id not in ids[1:]
        begun = "<|begin_of_text|>x" if ids[0] == ours.bos_id else "x"
        assert ours.with_bos("x") == begun and ours.with_bos("<|begin_of_text|>x") == "<|begin_of_text|>x"
        assert ours.encode_prompt("<|begin_of_text|>x").count(ours.bos_id) == 1
        return ids[0] == ours.bos_id

    assert begins("llama-bpe") and begins("tekken") and not begins("qwen2") and not begins("gpt-2")
    assert begins("qwen2", ggml__add_bos_token=True) and not begins("llama-bpe", ggml__add_bos_token=False)


def test_places_that_were_filled_up_are_no_tokens(tmp_path: Path) -> None:
    folder = text_models.write_model(tmp_path / "model", published("qwen2"), QWEN_CONFIG)
    theirs = Ours.load(folder)
    count = theirs.vocab_size
    (folder / "config.json").write_text("{}")
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    texts = {
        **{i: t for t, i in data["model"]["vocab"].items()},
        **{a["id"]: a["content"] for a in data["added_tokens"]},
    }
    tokens = [texts[number] for number in range(count)] + [f"[PAD{number}]" for number in range(count, count + 5)]
    special = {a["id"]: 3 if a["special"] else 4 for a in data["added_tokens"]}
    kinds = [special.get(number, 1) for number in range(count)] + [5] * 5
    ours = Ours.load(write_tokenizer(folder, tmp_path / "m.gguf", ggml__tokens=tokens, ggml__token_type=kinds))
    assert ours.decode([count + 2]) == "" and ours.token_id(f"[PAD{count}]") is None
    assert ours.encode(f"[PAD{count}]<|im_end|>") == theirs.encode(f"[PAD{count}]<|im_end|>")
    assert ours.encode_rendered("<|im_end|>") == theirs.encode_rendered("<|im_end|>")


def test_templates_of_a_file(tmp_path: Path) -> None:
    folder = text_models.write_model(tmp_path / "model", published("qwen2"), QWEN_CONFIG, "{{ messages }}")
    path = write_tokenizer(folder, tmp_path / "m.gguf", chat_template__tool_use="{{ tools }}")
    assert load_templates(path) == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert load_templates(write_tokenizer(folder, path, chat_template=None)) == {}
    alone = load_templates(write_tokenizer(folder, path, chat_template=None, chat_template__rag="x"))
    assert alone == {"default": "x", "rag": "x"}
    with pytest.raises(ModelFileError, match="none named 'default'; name one with --chat-template"):
        load_templates(write_tokenizer(folder, path, chat_template=None, chat_template__rag="x", chat_template__b="y"))


def llama(path: Path, tokens: list[str] | None = None, **extra: Any) -> Path:
    """Return a SentencePiece tokenizer of few pieces."""
    folder = path.parent / "llama"
    if not folder.exists():
        text_models.write_model(folder, text_models.sentencepiece(), LLAMA2_CONFIG)
    if tokens is not None:
        texts = ["<unk>", "<s>", "</s>", *tokens]
        ids = {"ggml__tokens": texts, "ggml__token_type": [UNKNOWN, CONTROL, CONTROL] + [1] * len(tokens)}
        extra = ids | {"ggml__scores": [0.0] * len(texts)} | extra
    return write_tokenizer(folder, path, **extra)


def test_pieces_with_too_many_ways_to_make_them_are_refused(tmp_path: Path) -> None:
    """A file of 136 KB took 144 MB this way, and one ten times as large killed the process."""
    long = llama(tmp_path / "long.gguf", ["a" * count for count in range(1, 513)])
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=r"long\.gguf: the merges of its tokens have more than \d+ characters"):
            Ours.load(long)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    assert Ours.load(llama(tmp_path / "m.gguf", ["▁", *("a" * count for count in range(1, 65))])).encode("a" * 63)


def test_merges_hold_no_texts_of_their_own() -> None:
    tokens = ["a" * count for count in range(1, 201)]
    vocab = {token: number for number, token in enumerate(tokens)}
    made = _merges(vocab, [0.0] * 200, Path("m.gguf"))
    known = {id(token) for token in tokens}
    assert len(made) == 199 * 200 // 2 and all(id(one) in known for pair in made for one in pair)


def test_sentencepiece_without_named_tokens_has_those_of_llama_cpp(tmp_path: Path) -> None:
    unnamed = {f"ggml__{name}_token_id": None for name in ("bos", "eos", "unknown")}
    named, ours = Ours.load(llama(tmp_path / "a.gguf")), Ours.load(llama(tmp_path / "b.gguf", **unnamed))
    assert (
        ours.special_tokens == named.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    )
    assert ours.encode_prompt("a") == named.encode_prompt("a") and ours.encode_prompt("a")[0] == 1
    # If other tokens have these ids, they are not control tokens.
    texts = ["▁", "a", "b"]
    odd = {"ggml__tokens": texts, "ggml__token_type": [1, 1, 1], "ggml__scores": [0.0] * 3}
    assert Ours.load(llama(tmp_path / "c.gguf", **unnamed, **odd)).special_tokens == {}
    short = {name: value[:1] for name, value in odd.items()}
    assert Ours.load(llama(tmp_path / "d.gguf", **unnamed, **short)).special_tokens == {}


PIECES_BROKEN: dict[str, dict[str, Any]] = {
    "token_type": {"ggml__token_type": [2.0, 3.0, 3.0, float("nan"), 1.0]},
    "token_type, infinite": {"ggml__token_type": [2.0, 3.0, 3.0, float("inf"), 1.0]},
    "token_type, truth": {"ggml__token_type": [True] * 5},
    "scores": {"ggml__scores": [0.0, 0.0, 0.0, float("nan"), 0.0]},
    "scores, infinite": {"ggml__scores": [0.0, 0.0, 0.0, float("-inf"), 0.0]},
    "scores, truth": {"ggml__scores": [True] * 5},
}


@pytest.mark.parametrize("name", PIECES_BROKEN)
def test_kinds_and_scores_that_are_no_numbers_are_one_sentence(name: str, tmp_path: Path) -> None:
    path = llama(tmp_path / "m.gguf", ["▁", "a"], **PIECES_BROKEN[name])
    with pytest.raises(ModelFileError, match=rf"tokenizer\.ggml\.{name.split(',')[0]} must be a list of 5 "):
        Ours.load(path)


def test_a_file_without_kinds_has_what_the_texts_tell(tmp_path: Path) -> None:
    """Names in the file, texts in the template, known end tokens and bytes are control tokens; the rest is text."""
    folder = text_models.write_model(tmp_path / "model", published("qwen2"), QWEN_CONFIG, "<|im_start|>{{ 1 }}<b>")
    theirs = Ours.load(write_tokenizer(folder, tmp_path / "a.gguf"))
    ours = Ours.load(write_tokenizer(folder, tmp_path / "b.gguf", ggml__token_type=None))
    names = {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"}
    assert names <= ours.controls.ids.keys() <= theirs.controls.ids.keys()
    text = "<|im_start|>The fox<|im_end|>"
    assert ours.encode(text, special=True) == theirs.encode(text, special=True)
    assert ours.encode(text) == theirs.encode(text)
    theirs, ours = Ours.load(llama(tmp_path / "c.gguf")), Ours.load(llama(tmp_path / "d.gguf", ggml__token_type=None))
    for text in ("the fox", "<s>", "ß <0x41>", "\N{SNOWMAN}"):
        assert ours.encode_prompt(text) == theirs.encode_prompt(text)
        assert ours.encode_prompt(text, special=False) == theirs.encode_prompt(text, special=False)
    assert ours.controls.ids == theirs.controls.ids


def test_a_control_token_of_the_wrong_kind_among_pieces(tmp_path: Path) -> None:
    path = llama(tmp_path / "m.gguf", ["▁", "a", "<|im_end|>", "<|user|>", "<b>"], chat_template="<|user|><b>")
    ours = Ours.load(path)
    assert ours.controls.ids == {"<unk>": 0, "<s>": 1, "</s>": 2, "<|im_end|>": 5, "<|user|>": 6}
    assert ours.end_ids == {2, 5}


def test_merges_that_nothing_can_use_are_left_out(tmp_path: Path) -> None:
    folder = text_models.write_model(tmp_path / "model", published("qwen2"), QWEN_CONFIG)
    merges = [" ".join(pair) for pair in json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]]
    odd = ["zq zq", *merges[:9], "a zebra", "a \x00", *merges[9:]]
    ours, theirs = Ours.load(write_tokenizer(folder, tmp_path / "m.gguf", ggml__merges=odd)), Ours.load(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


def test_the_first_of_two_equal_merges_counts(tmp_path: Path) -> None:
    folder = text_models.write_model(tmp_path / "model", published("qwen2"), QWEN_CONFIG)
    merges = [" ".join(pair) for pair in json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]]
    ours = Ours.load(write_tokenizer(folder, tmp_path / "m.gguf", ggml__merges=[*merges, *merges[:200]]))
    theirs = Ours.load(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


def test_unknown_named_tokens_are_left_out_and_the_first_of_several_is_named(tmp_path: Path) -> None:
    folder = text_models.write_model(tmp_path / "model", published("qwen2"), QWEN_CONFIG)
    ends = [Ours.load(folder).token_id(text) for text in ("<|im_end|>", "<|endoftext|>")]
    path = write_tokenizer(
        folder,
        tmp_path / "m.gguf",
        ggml__eos_token_id=ends,
        ggml__bos_token_id=1 << 20,
        ggml__unknown_token_id=1 << 20,
        ggml__add_bos_token=True,
    )
    ours = Ours.load(path)
    assert ours.special_tokens["eos_token"] == "<|im_end|>" and ours.bos_id is None
    assert ours.encode_prompt("a") == ours.encode("a") and ours.with_bos("a") == "a"


def test_bytes_that_a_vocabulary_lacks_are_known(tmp_path: Path) -> None:
    folder = text_models.write_model(tmp_path / "model", published("gpt-2"), QWEN_CONFIG)
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocab = data["model"]["vocab"]
    assert Ours.load(folder).missing_bytes == frozenset()
    vocab["unused"] = vocab.pop("\u0104")  # byte 4
    vocab["unused too"] = vocab.pop("\u00c0")  # not a byte of UTF-8
    data["model"]["merges"] = [pair for pair in data["model"]["merges"] if "\u0104" not in "".join(pair)]
    (folder / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    ours = Ours.load(folder)
    assert ours.missing_bytes == {4} and ours.encode_raw(".\x04.", "") == ours.encode("..")
    with pytest.raises(InvalidRequest, match="only bytes that the vocabulary lacks: 0x04") as caught:
        ours.encode_raw("\x04\x04", "")
    assert caught.value.field == "prompt" and ours.encode_raw("", "") == []


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "model": (
        {"ggml__model": "rwkv"},
        r"m\.gguf: the tokenizer 'rwkv' is not supported; supported are bert, gemma4, gpt2, ",
    ),
    "split": (
        {"ggml__pre": "klingon"},
        r"split 'klingon' is not supported; supported are command-r, dbrx, deepseek-r1-qwen, ",
    ),
    "no split": ({"ggml__pre": None}, r"does not say how text is split \(tokenizer\.ggml\.pre\)"),
    "no tokens": ({"ggml__tokens": None}, r"m\.gguf: tokenizer\.ggml\.tokens must be a list of texts"),
    "numbers": ({"ggml__tokens": [1, 2]}, r"tokenizer\.ggml\.tokens must be a list of texts"),
    "kinds": ({"ggml__token_type": [1, 2]}, r"tokenizer\.ggml\.token_type must be a list of \d+ whole numbers"),
    "no merges": ({"ggml__merges": None}, r"tokenizer\.ggml\.merges must be a list of texts"),
    "merges": ({"ggml__merges": ["a zebra b"]}, r"merges must hold pairs of tokens, found 'a zebra b'"),
    "eos": ({"ggml__eos_token_id": 1 << 20}, r"tokenizer\.ggml\.eos_token_id must be a token id"),
    "flag": ({"ggml__add_bos_token": 1}, r"tokenizer\.ggml\.add_bos_token must be true or false, found 1"),
    "template": ({"chat_template": 7}, r"tokenizer\.chat_template must be a string, found 7"),
}


def test_a_token_that_a_model_does_not_have_may_be_named_by_no_token(tmp_path: Path) -> None:
    folder = text_models.write_model(tmp_path / "model", published("qwen2"), QWEN_CONFIG)
    none = (1 << 32) - 1
    path = write_tokenizer(folder, tmp_path / "m.gguf", ggml__seperator_token_id=none, ggml__padding_token_id=none)
    assert Ours.load(path).special_tokens.keys().isdisjoint({"sep_token", "pad_token"})


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tokenizer_is_a_short_error_and_never_a_fallback(name: str, tmp_path: Path) -> None:
    """Known failure 20."""
    extra, sentence = BROKEN[name]
    folder = text_models.write_model(tmp_path / "model", published("qwen2"), QWEN_CONFIG)
    path = write_tokenizer(folder, tmp_path / "m.gguf", **extra)
    with pytest.raises(ModelError, match=sentence):
        Ours.load(path)
        load_templates(path)
