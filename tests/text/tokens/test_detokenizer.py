from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library

from cairn.text.tokens.detokenizer import Detokenizer, _WindowDetokenizer
from cairn.text.tokens.tokenizer import Tokenizer
from tests.text import text_models


@pytest.fixture(scope="module", params=text_models.KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Library]:
    """Return a tokenizer of each kind, ours and the library's own."""
    text = text_models.KINDS[request.param]()
    folder = text_models.write_model(tmp_path_factory.mktemp("model"), text, {})
    return Tokenizer.load(folder), Library.from_str(text)


def joined(stream: Detokenizer, ids: Sequence[int], rng: random.Random) -> str:
    """Push ids in random pieces; return the joined text."""
    pieces, at = [], 0
    while at < len(ids):
        size = rng.choice((1, 1, 1, 2, 5))
        pieces.append(stream.push(ids[at : at + size]))
        at += size
    return "".join([*pieces, stream.flush()])


def test_pieces_join_to_the_decoded_whole_for_random_ids(pair: tuple[Tokenizer, Library]) -> None:
    """Known failure 19: any ids, also such that cut characters or are no text at all."""
    ours, library = pair
    rng = random.Random(7)
    for _ in range(400):
        ids = [rng.randrange(library.get_vocab_size() + 3) for _ in range(rng.randrange(40))]
        for skip in (True, False):
            stream = ours.detokenizer(skip=None if skip else ())
            assert joined(stream, ids, rng) == library.decode(ids, skip_special_tokens=skip), ids


def test_pieces_join_to_the_text(pair: tuple[Tokenizer, Library]) -> None:
    """Known failure 19: multi-byte characters and newlines may be cut anywhere."""
    ours, library = pair
    rng = random.Random(8)
    for text in [*text_models.TEXTS, " leading", "  two", "\n\n\n", "a\u0301", "tail ", "😀" * 9]:
        ids = ours.encode(text)
        assert joined(ours.detokenizer(), ids, rng) == library.decode(ids)


def test_byte_level_text_survives_exactly() -> None:
    """Known failure 19."""
    library = Library.from_str(text_models.byte_level())
    ours = Tokenizer(library, {"type": "ByteLevel"}, {})
    rng = random.Random(9)
    for text in [*text_models.TEXTS, "\r\n\t \u200b\U0001f600x"]:
        assert joined(ours.detokenizer(), ours.encode(text), rng) == text


def test_a_character_is_passed_on_with_its_last_byte_and_not_before() -> None:
    """Known failure 19."""
    ours = Tokenizer(Library.from_str(text_models.byte_level()), {"type": "ByteLevel"}, {})
    # The four bytes of U+1F600 in the vocabulary's alphabet
    ids = [ours.encode("a")[0]] + [ours.token_id(char) for char in "ðŁĺĢ"]
    stream = ours.detokenizer()
    assert [stream.push((i,)) for i in ids] == ["a", "", "", "", "😀"]
    stream = ours.detokenizer()
    assert stream.push(ids[:3]) + stream.flush() == "a\ufffd"


def test_byte_fallback_runs() -> None:
    """Known failure 19: a run of byte tokens becomes one text if it is valid as a whole."""
    text = text_models.sentencepiece()
    library = Library.from_str(text)
    ours = Tokenizer(library, json.loads(text)["decoder"], {})

    def byte(value: int) -> int:
        result = library.token_to_id(f"<0x{value:02X}>")
        assert result is not None
        return result

    euro = [byte(value) for value in "€".encode()]
    stream = ours.detokenizer()
    assert [stream.push((i,)) for i in euro] == ["", "", ""]
    assert stream.push(ours.encode("a")) == "€ a"
    stream = ours.detokenizer()
    assert stream.push([*euro, byte(0xFF)]) + stream.flush() == "\ufffd" * 4
    assert ours.token_bytes(byte(0xFF)) == b"\xff"


def test_skipped_ids_can_be_chosen(pair: tuple[Tokenizer, Library]) -> None:
    ours, library = pair
    ids = ours.encode("the quick brown fox")
    dropped = ids[1]
    rest = [i for i in ids if i != dropped]
    stream = ours.detokenizer(skip={dropped})
    assert stream.push(ids) + stream.flush() == library.decode(rest, skip_special_tokens=False)


def test_an_unusual_decoder_streams_ordinary_text(tmp_path: Path) -> None:
    text = text_models.suffix_bpe()
    ours = Tokenizer.load(text_models.write_model(tmp_path, text, {}))
    ids = ours.encode("the quick brown fox jumps over the lazy dog " * 20)
    stream = ours.detokenizer()
    pieces = [stream.push((i,)) for i in ids]
    assert "".join([*pieces, stream.flush()]).split() == Library.from_str(text).decode(ids).split()


def test_invalid_bytes_are_not_decoded_again_and_again() -> None:
    """With an unknown kind of decoder, what is held back is bounded, and a character behind it comes out whole."""
    data = json.loads(text_models.byte_level())
    replace = {"type": "Replace", "pattern": {"String": "\0"}, "content": "0"}
    data["decoder"] = {"type": "Sequence", "decoders": [data["decoder"], replace]}
    library = Library.from_str(json.dumps(data))
    ours = Tokenizer(library, data["decoder"], {})
    bad, *character = (library.token_to_id(char) for char in "ĢðŁĺĢ")  # byte 0x80, then the four of U+1F600
    stream = ours.detokenizer()
    pieces = []
    for _ in range(4000):
        pieces.append(stream.push((bad,)))
        assert isinstance(stream, _WindowDetokenizer)
        assert len(stream._ids) <= 64
    assert "".join([*pieces, stream.flush()]) == library.decode([bad] * 4000) == "\ufffd" * 4000
    for count in range(40):
        ids = [bad] * count + character
        stream = ours.detokenizer()
        assert "".join([*(stream.push((i,)) for i in ids), stream.flush()]) == library.decode(ids)


def test_token_bytes_join_to_the_text(pair: tuple[Tokenizer, Library]) -> None:
    ours, library = pair
    ids = ours.encode("the quick brown 世界 fox")
    text = b"".join(ours.token_bytes(i) for i in ids).decode()
    assert text.strip() == library.decode(ids).strip()
    assert ours.token_bytes(10**6) == b""


@pytest.mark.parametrize("said", ["你好吗", "a"])
@pytest.mark.parametrize("cut", [0, 1])
def test_an_answer_after_a_prompt_that_ends_within_a_character_loses_no_text(said: str, cut: int) -> None:
    """An unknown kind of decoder gets some ids of the prompt as context; those that do not decode are left out."""
    data = json.loads(text_models.sentencepiece())
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}
    data["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, metaspace]}
    library = Library.from_str(json.dumps(data))
    ours = Tokenizer(library, data["decoder"], {})

    def ids(data: bytes) -> list[int]:
        return [library.token_to_id(f"<0x{byte:02X}>") for byte in data]

    after, text = ids(f"{said}€".encode()[: len(said.encode()) + cut * 2]), ids("你".encode())
    for pieces in ([text], [[one] for one in text]):
        stream = ours.detokenizer(after=after)
        assert "".join([*(stream.push(piece) for piece in pieces), stream.flush()]) == "你"
