"""Post-processing of texts and pairs: as the tokenizers library does it, while typed control tokens stay text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors

from cairn.text.tokens.tokenizer import Tokenizer
from tests.encoders import write_tokenizer
from tests.service.tiny import make_model


@pytest.fixture
def both(tmp_path: Path) -> tuple[Tokenizer, Library]:
    write_tokenizer(tmp_path)
    return Tokenizer.load(tmp_path), Library.from_file(str(tmp_path / "tokenizer.json"))


def test_one_text_and_two(both: tuple[Tokenizer, Library]) -> None:
    tokenizer, library = both
    for text in ("hello", "a b c", "Ümlaut."):
        assert list(tokenizer.affixes.whole(tokenizer.encode(text)).tokens) == library.encode(text).ids
        pair, want = tokenizer.affixes.both(tokenizer.encode(text), tokenizer.encode("xy")), library.encode(text, "xy")
        assert list(pair.tokens) == want.ids
        assert [int(at >= pair.second) for at in range(len(pair.tokens))] == want.type_ids


def test_long_texts_are_truncated_before_the_control_tokens(both: tuple[Tokenizer, Library]) -> None:
    affixes = both[0].affixes
    assert affixes.whole([9] * 20, 5).tokens == (2, 9, 9, 9, 3)
    assert affixes.whole([9] * 3, 5).tokens == (2, 9, 9, 9, 3)
    assert affixes.both([8] * 4, [9] * 20, 10).tokens == (2, 8, 8, 8, 3, 9, 9, 9, 9, 3)
    assert affixes.both([8] * 2, [9] * 20, 10).tokens == (2, 8, 8, 3, 9, 9, 9, 9, 9, 3)
    assert affixes.both([8] * 20, [9] * 2, 10).tokens == (2, 8, 8, 8, 8, 8, 3, 9, 9, 3)
    assert affixes.both([8] * 3, [9] * 3, 100).second == 5


def test_a_typed_control_token_is_text(both: tuple[Tokenizer, Library]) -> None:
    tokens = both[0].affixes.whole(both[0].encode("a [SEP] b")).tokens
    assert tokens[0] == 2 and tokens[-1] == 3 and not {2, 3} & set(tokens[1:-1])


def test_texts_as_xlm_roberta_reads_them(tmp_path: Path) -> None:
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(letter, -3.0 - at) for at, letter in enumerate("abcdef")] + [("▁a", -1.0)]
    library = Library(models.Unigram(pieces, unk_id=3))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    tokenizer = Tokenizer.load(tmp_path)
    for text in ("a b", "face", " dead beef "):
        assert list(tokenizer.affixes.whole(tokenizer.encode(text)).tokens) == library.encode(text).ids
        pair = tokenizer.affixes.both(tokenizer.encode(text), tokenizer.encode("bad a"))
        assert list(pair.tokens) == library.encode(text, "bad a").ids and pair.second == 0


def test_a_decoder_has_what_its_settings_say(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    plain = Tokenizer.load(folder)
    assert plain.affixes.whole([5, 6]).tokens == (5, 6)
    settings = folder / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("{", '{"add_eos_token": true, ', 1))
    assert Tokenizer.load(folder).affixes.whole([5, 6]).tokens == (5, 6, plain.eos_id)
