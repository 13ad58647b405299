from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from cairn.text.tokens.control_tokens import Controls, is_control
from cairn.text.tokens.tokenizer import MENDED_AT_ONCE, Tokenizer, valid_text
from cairn.types.errors import ModelFileError
from tests.text import text_models

MARK = "\ufde0"


@pytest.fixture
def qwen(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(text_models.write_model(tmp_path, text_models.byte_level(), text_models.QWEN_CONFIG))


@pytest.fixture
def llama3(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(
        text_models.write_model(tmp_path, text_models.byte_level("llama3"), text_models.LLAMA3_CONFIG)
    )


@pytest.fixture
def llama2(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(text_models.write_model(tmp_path, text_models.sentencepiece(), text_models.LLAMA2_CONFIG))


# -- files ---------------------------------------------------------------------------------------------------


def test_a_missing_tokenizer_is_an_error_and_never_a_fallback(tmp_path: Path) -> None:
    """Known failure 20."""
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: the file is missing; .*must hold a tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tekken.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"])
def test_a_vocabulary_that_is_not_read_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelFileError, match=rf"must hold a tokenizer\.json, and {name} \(.*--tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_text_is_always_the_same_tokens(tmp_path: Path) -> None:
    """Some files ask for BPE dropout, as in training."""
    text = "abab" * 16
    vocab = {"a": 0, "b": 1, "ab": 2, "abab": 3}
    model = {"type": "BPE", "vocab": vocab, "merges": ["a b", "ab ab"], "dropout": 0.5}
    said = json.loads(Library(models.BPE()).to_str()) | {"model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    theirs = Library.from_file(str(tmp_path / "tokenizer.json"))
    assert len({tuple(theirs.encode(text).ids) for _ in range(20)}) > 1, "the file leaves out nothing"
    ours = Tokenizer.load(tmp_path)
    assert {tuple(ours.encode(text)) for _ in range(50)} == {(3,) * 16}
    assert {tuple(ours.encode(text, special=True)) for _ in range(50)} == {(3,) * 16}


def test_added_tokens_of_a_file_of_their_own(tmp_path: Path) -> None:
    """Reads added_tokens.json as transformers does: the configuration names the special ones."""
    config = {"eos_token": "<|stop|>", "additional_special_tokens": ["<|also|>"]}
    folder = text_models.write_model(tmp_path, text_models.byte_level(), config)
    known = Tokenizer.load(folder).vocab_size
    added = {"<|stop|>": known, "<|also|>": known + 1, "<|word|>": known + 2}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    ours = Tokenizer.load(folder)
    assert [ours.token_id(text) for text in added] == [known, known + 1, known + 2]
    assert ours.special_ids >= {known, known + 1}
    assert known + 2 not in ours.special_ids
    assert ours.eos_id == known
    assert ours.encode("x<|word|>", special=True)[-1] == known + 2
    for value in ("x", True, -1):
        (folder / "added_tokens.json").write_text(json.dumps({"<|a|>": value}))
        with pytest.raises(ModelFileError, match=r"added_tokens\.json: must give each token a whole number"):
            Tokenizer.load(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"{}",
        b'{"model": {"type": "BPE"}}',
        b'{"model": 5, "decoder": {"type": "ByteLevel"}}',
        b'{"decoder": "ByteLevel"}',
        b"[" * 100_000,
        text_models.byte_level().encode()[:-200],
    ],
)
def test_a_broken_tokenizer_is_an_error_and_never_a_fallback(tmp_path: Path, content: bytes) -> None:
    """Known failure 20."""
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"])
def test_a_broken_config_beside_it_is_an_error(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_text(text_models.byte_level())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelFileError, match=name):
        Tokenizer.load(tmp_path)


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    size = Library.from_str(text_models.byte_level()).get_vocab_size()
    extra = {str(size): {"content": "<|extra|>", "special": True}, "0": {"content": "!", "special": False}}
    config = {**text_models.QWEN_CONFIG, "added_tokens_decoder": extra}
    made = Tokenizer.load(text_models.write_model(tmp_path, text_models.byte_level(), config))
    assert made.encode("<|extra|>", special=True) == [size]
    assert size in made.special_ids
    assert size not in made.encode("<|extra|>")
    config["added_tokens_decoder"] = {"70000": {"content": "<|far|>"}}
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json.*70000"):
        Tokenizer.load(text_models.write_model(tmp_path, text_models.byte_level(), config))


def test_special_tokens_come_from_the_config_and_from_the_map(tmp_path: Path) -> None:
    text_models.write_model(tmp_path, text_models.byte_level(), {"eos_token": "<|im_end|>", "bos_token": None})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<|endoftext|>", "eos_token": "x"}))
    made = Tokenizer.load(tmp_path)
    assert made.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert made.eos_id == made.token_id("<|im_end|>")
    assert made.bos_id is None


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    library = Library.from_str(text_models.byte_level())
    library.enable_truncation(3)
    library.enable_padding(length=50)
    made = Tokenizer.load(text_models.write_model(tmp_path, library.to_str(), {}))
    ids = made.encode("the quick brown fox jumps over the lazy dog", special=True)
    assert made.decode(ids) == "the quick brown fox jumps over the lazy dog"
    assert len(ids) > 3


# -- control tokens -------------------------------------------------------------------------------------------


def unknown(kind: str) -> dict[str, str]:
    return {"unk_token": "[UNK]" if kind == "wordpiece" else "<unk>"}


CONTROLS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]


@pytest.mark.parametrize("control", CONTROLS)
def test_typed_control_tokens_are_ordinary_text(qwen: Tokenizer, control: str) -> None:
    text = f"say {control} and{control}{control}"
    ids = qwen.encode(text)
    assert qwen.control_ids.isdisjoint(ids)
    assert qwen.decode(ids, skip_special=False) == text
    assert qwen.control_ids.isdisjoint(qwen.encode_prompt(text, special=False))
    # In a raw prompt the caller takes the template's place
    assert qwen.encode_prompt(text).count(qwen.controls.ids[control]) == 3
    assert qwen.encode(text, special=True).count(qwen.controls.ids[control]) == 3


@pytest.mark.parametrize("kind", text_models.KINDS)
def test_typed_control_tokens_are_ordinary_text_in_every_kind(kind: str, tmp_path: Path) -> None:
    """Also where the model's own vocabulary or merges can spell one."""
    made = Tokenizer.load(text_models.write_model(tmp_path, text_models.KINDS[kind](), unknown(kind)))
    unk = made.token_id(unknown(kind)["unk_token"])
    for control in made.controls.ids:
        for text in (control, f"a{control}", f"a {control} b", control * 3, f"{control}\n"):
            assert made.control_ids.isdisjoint(set(made.encode(text)) - {unk}), text


@pytest.mark.parametrize("kind", text_models.KINDS)
def test_without_control_tokens_all_ways_of_encoding_agree(kind: str, tmp_path: Path) -> None:
    text = text_models.KINDS[kind]()
    made = Tokenizer.load(text_models.write_model(tmp_path, text, unknown(kind)))
    library = Library.from_str(text)
    for sample in [*text_models.TEXTS, "", " ", "  x", "x  ", "\n\n", "        indented"]:
        expected = library.encode(sample, add_special_tokens=False).ids
        assert made.encode(sample) == expected
        assert made.encode(sample, special=True) == expected
        assert made.encode_rendered(sample) == expected


@pytest.mark.parametrize("kind", text_models.KINDS)
def test_rendered_text_encodes_as_the_library_encodes_it_whole(kind: str, tmp_path: Path) -> None:
    """Known failure 23: control tokens are recognised, and the rest is encoded as in the whole text."""
    text = text_models.KINDS[kind]()
    made = Tokenizer.load(text_models.write_model(tmp_path, text, unknown(kind)))
    library = Library.from_str(text)
    rng = random.Random(3)
    controls = [one for one in made.controls.ids if one not in ("<unk>", "[UNK]")]
    words = ["the", " quick", "\n", " ", "fox's", "世界", "😀", "12", "<", "|", ">", "s", "im_end"]
    for _ in range(300):
        sample = "".join(rng.choice(controls if rng.random() < 0.3 else words) for _ in range(rng.randrange(12)))
        assert made.encode_rendered(sample) == library.encode(sample, add_special_tokens=False).ids, sample


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece-first", "unigram"])
@pytest.mark.parametrize("flags", [("normalized",), ("lstrip",), ("rstrip",), ("lstrip", "rstrip", "normalized")])
def test_rendered_text_encodes_as_the_whole_with_every_flag_of_a_token(
    kind: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Known failure 23: tokens that swallow spaces, or that are matched after normalising."""
    data = json.loads(text_models.KINDS[kind]())
    for one in data["added_tokens"]:
        one |= dict.fromkeys(flags, True)
    text = json.dumps(data)
    made = Tokenizer.load(text_models.write_model(tmp_path, text, unknown(kind)))
    library = Library.from_str(text)
    rng = random.Random(5)
    controls = [one for one in made.controls.ids if one != "<unk>"]
    words = ["the", " quick", "\n", " ", "  ", "fox's", "世界", "12", "<", "|"]
    for _ in range(200):
        sample = "".join(rng.choice(controls if rng.random() < 0.3 else words) for _ in range(rng.randrange(12)))
        assert made.encode_rendered(sample) == library.encode(sample, add_special_tokens=False).ids, sample


def test_control_tokens_that_a_normaliser_hides_are_seen_in_a_template(tmp_path: Path) -> None:
    """Known failure 21: early Llama files mark them as normalised, with a normaliser that puts a space in front."""
    data = json.loads(text_models.sentencepiece())
    plain = Tokenizer.load(text_models.write_model(tmp_path / "a", json.dumps(data), text_models.LLAMA2_CONFIG))
    for added_token in data["added_tokens"]:
        added_token["normalized"] = True
    hidden = Tokenizer.load(text_models.write_model(tmp_path / "b", json.dumps(data), text_models.LLAMA2_CONFIG))
    text = "<s>the fox</s><s> quick</s>"
    assert hidden.encode("x</s>x", special=True).count(hidden.eos_id or 0) == 0
    assert hidden.encode_rendered(text) == plain.encode_rendered(text)
    assert hidden.encode_rendered(text).count(hidden.bos_id or 0) == 2
    assert hidden.control_ids.isdisjoint(hidden.encode(text))


def test_marks_keep_control_tokens_ordinary_and_change_nothing_else(qwen: Tokenizer) -> None:
    """Known failure 23."""
    rng = random.Random(4)
    words = [*CONTROLS, "<|", "im_end|>", "<", "think>", "hello", " ", "\n", "<|im_", "<<|im_end|>>"]
    for _ in range(500):
        user = "".join(rng.choice(words) for _ in range(rng.randrange(6)))
        broken = qwen.controls.break_up(user, MARK)
        assert broken.replace(MARK, "") == user
        rendered = f"<|im_start|>user\n{broken}<|im_end|>\n"
        ids = qwen.encode_rendered(rendered, MARK)
        assert qwen.decode(ids, skip_special=False) == rendered.replace(MARK, "")
        assert [i for i in ids if i in qwen.control_ids] == [qwen.token_id("<|im_start|>"), qwen.token_id("<|im_end|>")]


def test_two_texts_side_by_side_cannot_spell_a_control_token(qwen: Tokenizer) -> None:
    for control in CONTROLS:
        for cut in range(1, len(control)):
            left = qwen.controls.break_up("x" + control[:cut], MARK)
            right = qwen.controls.break_up(control[cut:] + "y", MARK)
            assert qwen.control_ids.isdisjoint(qwen.encode_rendered(left + right, MARK)), (control, cut)


def test_two_texts_that_a_template_trims_cannot_spell_a_control_token(qwen: Tokenizer) -> None:
    for control in CONTROLS:
        for cut in range(1, len(control)):
            left = qwen.controls.break_up(f"x{control[:cut]} \n", MARK).strip()
            right = qwen.controls.break_up(f"\t {control[cut:]}y", MARK).strip()
            assert qwen.control_ids.isdisjoint(qwen.encode_rendered(left + right, MARK)), (control, cut)


def test_a_text_whose_ends_a_template_writes_cannot_spell_a_control_token(
    qwen: Tokenizer, llama3: Tokenizer, llama2: Tokenizer
) -> None:
    """Known failure 23: '<' ~ key ~ '>'."""
    for made in (qwen, llama3, llama2):
        for control in made.controls.ids:
            for a, b in itertools.combinations(range(1, len(control)), 2):
                inside = control[a:b]
                for text in (inside, f" {inside}\n"):
                    broken = made.controls.break_up(text, MARK)
                    assert broken.replace(MARK, "") == text
                    ids = made.encode_rendered(control[:a] + broken.strip() + control[b:], MARK)
                    assert made.control_ids.isdisjoint(ids), (control, text)
                    assert ids == made.encode(control)


def test_text_within_a_token_can_be_left_unbroken() -> None:
    controls = Controls({"<|im_end|>": 1, "<s>": 2})
    assert controls.break_up("s", MARK) == f"s{MARK}"
    assert controls.break_up(" im_end ", MARK) == f" im_en{MARK}d "
    assert controls.break_up("im_end", MARK, whole=False) == "im_end"
    assert controls.break_up("x<s>", MARK, whole=False) == f"x<{MARK}s>"
    assert controls.break_up("word", MARK) == "word"


def test_marks_never_stand_at_an_end() -> None:
    controls = Controls({"<|im_end|>": 1, "<s>": 2})
    for text in ["<|im_end|>", "<s>", "<|im_", "end|>", "<", ">", "", "<s", "s>", "x<|", "|>x"]:
        broken = controls.break_up(text, MARK)
        assert broken == broken.strip(MARK)


def test_flags_and_names_make_a_token_a_control_token() -> None:
    def token(text: str, special: bool = False) -> bool:
        return is_control(AddedToken(text, special=special))

    assert token("<think>")
    assert token("[INST]")
    assert token("EOT", special=True)
    assert not token("    ")
    assert not token("hello")
    assert not token("<", special=True)


def test_an_added_run_of_spaces_stays_ordinary(qwen: Tokenizer) -> None:
    assert qwen.token_id("        ") in qwen.encode("x        y")


def test_lone_surrogates_do_no_harm(qwen: Tokenizer) -> None:
    """Known failure 19."""
    assert qwen.decode(qwen.encode("a\ud800b")) == "a\ufffdb"
    assert qwen.decode(qwen.encode("\ud83d\ude00")) == "😀"


def in_vocabulary(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """Return a byte-level tokenizer with tokens in its vocabulary that are not among added_tokens."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "<|im_end|>", "<think>"]
    library = Library(models.BPE({word: n for n, word in enumerate(words)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return Tokenizer.load(text_models.write_model(folder, library.to_str(), config))


def test_tokens_of_the_vocabulary_that_only_the_config_marks_as_special(tmp_path: Path) -> None:
    end = {"257": {"content": "<|im_end|>", "special": True}, "258": {"content": "<think>", "special": False}}
    config = {"bos_token": "<s>", "pad_token": "!", "sep_token": "<sep>", "added_tokens_decoder": end}
    made = in_vocabulary(tmp_path, config)
    assert made.special_ids == made.control_ids == {256, 257}
    assert made.encode("<s>a<|im_end|>", special=True) == made.encode_rendered("<s>a<|im_end|>") == [256, 64, 257]
    assert made.control_ids.isdisjoint(made.encode("<s>a<|im_end|>"))
    assert made.decode([256, 64, 257]) == "a"
    assert made.vocab_size == 259
    assert made.decode(made.encode("hi!")) == "hi!"  # a padding token of one character is text


def test_a_special_token_of_the_vocabulary_keeps_its_id(tmp_path: Path) -> None:
    listed = {"256": {"content": "<|im_end|>", "special": True}}
    with pytest.raises(ModelFileError, match=r"'<\|im_end\|>' the id 256"):
        in_vocabulary(tmp_path, {"added_tokens_decoder": listed})


# -- BOS ------------------------------------------------------------------------------------------------------


def test_a_raw_prompt_gets_bos_exactly_once(llama3: Tokenizer, llama2: Tokenizer, qwen: Tokenizer) -> None:
    """Known failure 21."""
    for made in (llama3, llama2):
        ids = made.encode_prompt("the fox")
        assert ids[0] == made.bos_id
        assert ids.count(made.bos_id) == 1
        assert ids[1:] == made.encode("the fox")
        typed = made.encode_prompt(f"{made.special_tokens['bos_token']}the fox")
        assert typed.count(made.bos_id) == 1 and made.encode_prompt(made.spell(typed)) == typed
        spelt = made.encode_prompt(f"{made.special_tokens['bos_token']}the fox", special=False)
        assert spelt.count(made.bos_id) == 1 and len(spelt) > len(typed)
    assert qwen.encode_prompt("the fox") == qwen.encode("the fox")


def test_the_config_has_the_last_word_on_bos(tmp_path: Path) -> None:
    """Known failure 21."""
    config = {**text_models.LLAMA3_CONFIG, "add_bos_token": False}
    made = Tokenizer.load(text_models.write_model(tmp_path, text_models.byte_level("llama3"), config))
    assert made.encode_prompt("the fox") == made.encode("the fox")


def test_encode_never_adds_special_tokens(llama3: Tokenizer, llama2: Tokenizer) -> None:
    """Known failure 21: a template writes its own BOS."""
    rendered = "<|begin_of_text|>x"
    assert llama3.encode_rendered(rendered).count(llama3.bos_id) == 1
    assert llama3.encode(rendered, special=True).count(llama3.bos_id) == 1
    assert llama2.bos_id not in llama2.encode("x")


def test_decoding_leaves_special_tokens_out(qwen: Tokenizer) -> None:
    ids = qwen.encode("<|im_start|>hi<think><|im_end|>", special=True)
    assert qwen.decode(ids) == "hi<think>"
    assert qwen.decode(ids, skip_special=False) == "<|im_start|>hi<think><|im_end|>"
    assert qwen.token_bytes(ids[0]) == b"<|im_start|>"
    assert qwen.vocab_size == Library.from_str(text_models.byte_level()).get_vocab_size()


def test_a_vocabulary_with_holes(tmp_path: Path) -> None:
    data = json.loads(text_models.byte_level())
    vocab = data["model"]["vocab"]
    size = len(vocab)
    piece = max(vocab, key=lambda one: vocab[one])
    # The control token is in the vocabulary, behind a hole, and the id that an alias would get is taken.
    vocab["<|im_end|>"], vocab[piece] = size, size + 1
    data["added_tokens"] = [
        added_token for added_token in data["added_tokens"] if added_token["content"] == "<|im_end|>"
    ]
    data["added_tokens"][0]["id"] = size
    made = Tokenizer.load(text_models.write_model(tmp_path, json.dumps(data), {}))
    library = Library.from_str(json.dumps(data))
    text = " ".join([library.decode([size + 1]), *text_models.TEXTS])
    assert size + 1 in made.encode(text)
    assert made.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert made.encode_rendered("a<|im_end|>b") == library.encode("a<|im_end|>b", add_special_tokens=False).ids


def test_the_longest_control_token_counts_and_the_leftmost_wins() -> None:
    controls = Controls({"<a": 1, "<a>": 2, ">b<": 3})
    aliases = controls.aliases
    assert controls.with_aliases("<a>") == aliases["<a>"]
    assert controls.with_aliases("<a>b<a") == aliases["<a>"] + "b" + aliases["<a"]
    assert controls.with_aliases("x>b<a>") == "x" + aliases[">b<"] + "a>"
    assert list(controls.find("<a>b<")) == [(0, 3), (2, 5)]
    assert list(Controls({}).find("<a>")) == []


@pytest.mark.parametrize("listed", [{"1": "<x>"}, {"1": None}, {"1": ["<x>"]}, {"9" * 5000: {"content": "<x>"}}])
def test_invalid_tokens_of_the_config_are_a_short_error(tmp_path: Path, listed: dict[str, Any]) -> None:
    config = {**text_models.QWEN_CONFIG, "added_tokens_decoder": listed}
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json: .* added_tokens_decoder"):
        Tokenizer.load(text_models.write_model(tmp_path, text_models.byte_level(), config))


def test_surrogates_are_joined_and_replaced_wherever_they_stand() -> None:
    for before in (0, 1, MENDED_AT_ONCE - 2, MENDED_AT_ONCE - 1, MENDED_AT_ONCE, 2 * MENDED_AT_ONCE - 1):
        for pair, wanted in (("\ud83d\ude00", "\U0001f600"), ("\ude00\ud83d", "\ufffd\ufffd"), ("\ud83d", "\ufffd")):
            assert valid_text("x" * before + pair + "y\ud83d") == "x" * before + wanted + "y\ufffd"
    many = "\ud83d" * (MENDED_AT_ONCE + 1) + "\ude00" * 2
    assert valid_text(many) == "\ufffd" * MENDED_AT_ONCE + "\U0001f600\ufffd"
    rng = random.Random(1)
    for _ in range(200):
        text = "".join(rng.choices(["\ud83d", "\ude00", "a", "\u00e9", "\U0001f600"], k=20))
        assert valid_text(text) == text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
