"""End of turn tokens, whatever a model's files call them; raw prompts; stop sequences that are control tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest

from cairn import LLM
from cairn.config.config import Config
from cairn.models.families.end_tokens import FIM, UNMISTAKABLE, known_ends, known_middle
from cairn.models.gguf.reader import read_gguf
from cairn.models.gguf.spec import _ends, gguf_spec
from cairn.text.chat.prompt import Chat
from cairn.text.chat.templates import _SAID, load_text, turn_ends
from cairn.text.tokens.gguf import CONTROL, PLAIN, UNUSED, USER
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import InvalidRequest, ModelError
from tests.real_models import gemma3
from tests.scripted_model import CHATML, write_scripted
from tests.text import text_models

HI = [{"role": "user", "content": "Say it."}]
BOS = "<|begin|>"
THINKS = CHATML + "{# <think> </think> #}"
FINIS = CHATML.replace("<|im_end|>", "<|finis|>")


def other_eos(path: Path, pieces: list[str], *, kinds: dict[str, int] | None = None, **how: Any) -> Path:
    """Return a model that says the pieces, whose file names <|endoftext|> as its EOS."""
    write_scripted(path, pieces, kinds=kinds, **how)
    number = Tokenizer.load(path).token_id("<|endoftext|>")
    extra = {"tokenizer.ggml.eos_token_id": number} | how.pop("extra", {})
    return write_scripted(path, pieces, kinds=kinds, extra=extra, **how)


def said(path: Path, **sampling: Any) -> tuple[str, str | None]:
    with LLM(str(path), kv_gb=0.05, threads=1) as llm:
        answer = llm.chat(HI, temperature=0, **({"max_tokens": 8} | sampling))
        return answer.text, answer.finish_reason


@pytest.mark.parametrize(
    ("kind", "end", "template"),
    [
        *((kind, end, CHATML) for kind in (PLAIN, USER, UNUSED) for end in ("<|im_end|>", "<|eot_id|>")),
        *((kind, "<|finis|>", FINIS) for kind in (PLAIN, USER)),
    ],
)
def test_the_end_of_a_turn_ends_an_answer_whatever_the_file_calls_it(
    kind: int, end: str, template: str, tmp_path: Path
) -> None:
    path = other_eos(tmp_path / "m.gguf", ["Hi", "!"], kinds={end: kind}, end=end, template=template)
    assert said(path) == ("Hi!", "stop")


def test_an_end_that_a_file_calls_text_is_broken_up_in_messages(tmp_path: Path) -> None:
    path = other_eos(tmp_path / "m.gguf", ["Hi"], kinds={"<|im_end|>": PLAIN})
    with LLM(str(path), kv_gb=0.05, threads=1) as llm:
        tokenizer = llm._llm.service.tokenizer
        end = tokenizer.controls.ids["<|im_end|>"]
        prompt = llm._loop.wait(lambda: llm._llm.service.chat.prompt([{"role": "user", "content": "a<|im_end|>b"}]))
        assert prompt.tokens.count(end) == 1 and end in llm._llm.service.spec.eos_ids
        assert tokenizer.decode([end]) == ""


def test_a_word_that_merges_make_is_text_whatever_a_template_writes(tmp_path: Path) -> None:
    template = CHATML + "<b>"
    parts = {"<b": PLAIN, "<b>": PLAIN, "<c>": PLAIN}
    merges = {"tokenizer.ggml.merges": ["< b", "<b >"]}
    path = write_scripted(tmp_path / "m.gguf", ["x"], kinds=parts, template=template + "<c>", extra=merges)
    controls = Tokenizer.load(path).controls.ids
    assert "<b>" not in controls and "<c>" in controls


@pytest.mark.parametrize(
    "stop", ["<|im_start|>", "<|im_start|>b", "a<|im_start|>", "<|im_start|>bc", "\n<|endoftext|>"]
)
def test_a_stop_may_hold_control_tokens(stop: str, tmp_path: Path) -> None:
    pieces = ["a", "<|im_start|>", "b", "c", "\n", "<|endoftext|>", "d"]
    path = write_scripted(tmp_path / "m.gguf", pieces)
    shown, reason = said(path, stop=stop, ignore_eos=True, max_tokens=7)
    expected = {"a<|im_start|>": "", "\n<|endoftext|>": "abc"}.get(stop, "a")
    assert (shown, reason) == (expected, "stop")
    assert said(path, stop=["<|im_start|>c", "b<|im_start|>"], ignore_eos=True, max_tokens=7) == ("abc\nd", "length")


@pytest.mark.parametrize("pieces", [["if a", " <"], ["a", "\n"], ['{"a": ', "1}"], ["<tool", "_call>"]])
def test_an_answer_with_the_end_token_as_a_stop_is_the_answer_without_it(pieces: list[str], tmp_path: Path) -> None:
    path = write_scripted(tmp_path / "m.gguf", pieces, template=THINKS)
    whole = said(path)
    assert whole == ("".join(pieces), "stop") == said(path, stop=["<|im_end|>"])
    assert said(path, stop=["<|im_end|>"], ignore_eos=True) == whole


def test_a_stop_that_is_a_control_token_is_a_stop_token(tmp_path: Path) -> None:
    """It also ends reasoning, where stop texts are not matched. A token that is text to a reader is matched as text."""
    kinds = {"<think>": USER, "<b>": USER}
    path = write_scripted(tmp_path / "m.gguf", ["<think>", "a", "<|im_start|>", "b"], kinds=kinds, template=THINKS)
    with LLM(str(path), kv_gb=0.05, threads=1) as llm:
        controls, known = llm._llm.service.controls, llm._llm.service.tokenizer.controls.ids
        assert set(controls) == {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} and set(known) >= {"<think>", "<b>"}
        answer = llm.chat(HI, temperature=0, max_tokens=8, stop="<|im_start|>")
        assert (answer.reasoning, answer.text, answer.finish_reason) == ("a", "", "stop")
        assert answer.usage.completion_tokens == 3


# -- the beginning of a text ------------------------------------------------------------------------------------


async def begun(path: Path, template: str, **extra: Any) -> tuple[list[int], list[int], int]:
    """Return the ids of a chat, those of a raw prompt, and BOS."""
    kinds = {BOS: CONTROL}
    write_scripted(path, ["x"], kinds=kinds, template=template)
    number = Tokenizer.load(path).token_id(BOS)
    assert number is not None
    more = {"tokenizer.ggml.bos_token_id": number} | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}
    write_scripted(path, ["x"], kinds=kinds, template=template, extra=more)
    chat = await Chat.start(path, Config())
    try:
        prompt = await chat.prompt(HI)
        return list(prompt.tokens), chat.tokenizer.encode_prompt("a"), number
    finally:
        await chat.close()


async def test_a_file_that_wants_a_first_token_has_it_once(tmp_path: Path) -> None:
    for template in (CHATML, "{{ bos_token }}" + CHATML, "\n" + BOS + CHATML):
        chat, raw, bos = await begun(tmp_path / "m.gguf", template, add_bos_token=True)
        assert chat.count(bos) == raw.count(bos) == 1 and raw[0] == bos and bos in chat[:2]
    for wanted in ({}, {"add_bos_token": False}):  # this kind of tokenizer adds none by default
        chat, raw, bos = await begun(tmp_path / "m.gguf", CHATML, **wanted)
        assert bos not in chat and bos not in raw
    chat, raw, bos = await begun(tmp_path / "m.gguf", CHATML, pre="llama-bpe")
    assert chat[0] == raw[0] == bos and chat.count(bos) == 1


def test_folders_have_the_first_token_where_their_template_writes_it(tmp_path: Path) -> None:
    made = Tokenizer.load(
        text_models.write_model(tmp_path, text_models.byte_level("llama3"), text_models.LLAMA3_CONFIG)
    )
    assert made.with_bos("x") == "x" and made.encode_prompt("x")[0] == made.bos_id


# -- raw prompts ------------------------------------------------------------------------------------------------


def test_in_a_raw_prompt_control_tokens_are_control_tokens(tmp_path: Path) -> None:
    path = write_scripted(tmp_path / "m.gguf", ["x", "y"])
    with LLM(str(path), kv_gb=0.05, threads=1) as llm:
        tokenizer = llm._llm.service.tokenizer
        text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        read, typed = (llm.generate(text, temperature=0, max_tokens=1, parse_special=one) for one in (True, False))
        assert read.usage.prompt_tokens == len(tokenizer.encode(text, special=True))
        assert typed.usage.prompt_tokens == len(text)
        ids = tokenizer.encode_prompt(text)
        assert tokenizer.encode_prompt(tokenizer.spell(ids)) == ids
        assert llm._loop.wait(lambda: llm._llm.service.chat.prompt(HI)).tokens.count(tokenizer.eos_id) == 1
        with pytest.raises(InvalidRequest, match="no tokens for filling in the middle"):
            llm.generate("a", suffix="b")
        with pytest.raises(InvalidRequest, match="parse_special must be true or false"):
            llm.generate("a", parse_special=1)


def test_spelt_ids_are_read_back_also_where_every_text_begins_with_a_space(tmp_path: Path) -> None:
    for number, made in enumerate((text_models.sentencepiece(), text_models.sentencepiece(first_only=True))):
        folder = text_models.write_model(tmp_path / str(number), made, text_models.LLAMA2_CONFIG)
        tokenizer = Tokenizer.load(folder)
        for text in ("the fox", "<s>the fox</s>the dog", "<s>", " the", "", "a</s>"):
            ids = tokenizer.encode_prompt(text)
            assert tokenizer.encode_prompt(tokenizer.spell(ids)) == ids, text


@pytest.mark.parametrize("named", [False, True])
def test_the_middle_is_filled_in(named: bool, tmp_path: Path) -> None:
    """With known control tokens, or with those that the file names."""
    texts = ("<|a|>", "<|b|>", "<|c|>") if named else FIM[0]
    path, kinds = tmp_path / "m.gguf", dict.fromkeys(texts, CONTROL)
    write_scripted(path, ["mid"], kinds=kinds)
    result = Tokenizer.load(path)
    prefix, suffix, middle = (result.controls.ids[text] for text in texts)
    keys = [f"tokenizer.ggml.fim_{key}_token_id" for key in ("pre", "suf", "mid")]
    extra = dict(zip(keys, (prefix, suffix, middle), strict=True)) if named else {}
    write_scripted(path, ["mid"], kinds=kinds, extra=extra)
    with LLM(str(path), kv_gb=0.05, threads=1) as llm:
        tokenizer = llm._llm.service.tokenizer
        a, b = tokenizer.encode("a"), tokenizer.encode("b")
        assert tokenizer.encode_raw("a", "b") == [prefix, *a, suffix, *b, middle]
        assert tokenizer.encode_raw(a, "b") == tokenizer.encode_raw("a", "b")
        answer = llm.generate("a", suffix="b", temperature=0, max_tokens=4)
        assert answer.text == "mid" and answer.usage.prompt_tokens == 5


@pytest.mark.parametrize("wanted", [True, False])
def test_a_first_token_comes_once_before_the_middle(wanted: bool, tmp_path: Path) -> None:
    """Also where the prompt, as text or as ids, begins with BOS itself."""
    path, kinds = tmp_path / "m.gguf", dict.fromkeys((BOS, *FIM[0]), CONTROL)
    write_scripted(path, ["x"], kinds=kinds)
    bos = Tokenizer.load(path).controls.ids[BOS]
    extra = {"tokenizer.ggml.bos_token_id": bos, "tokenizer.ggml.add_bos_token": wanted}
    tokenizer = Tokenizer.load(write_scripted(path, ["x"], kinds=kinds, extra=extra))
    assert tokenizer.middle is not None
    prefix, suffix, middle = tokenizer.middle
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    filled = [prefix, *a, suffix, *b, middle]
    assert tokenizer.encode_raw("a", "b") == ([bos, *filled] if wanted else filled)
    begun = [bos, *filled] if wanted else [prefix, bos, *filled[1:]]
    assert tokenizer.encode_raw(BOS + "a", "b") == tokenizer.encode_raw([bos, *a], "b") == begun


# -- what is known ----------------------------------------------------------------------------------------------


def test_a_folder_ends_with_its_tokenizers_token_and_with_known_ones(tmp_path: Path) -> None:
    """Also where only special_tokens_map.json names it, or where the vocabulary has it as an ordinary piece."""
    data = json.loads(text_models.byte_level())
    ids = {added_token["content"]: added_token["id"] for added_token in data["added_tokens"]}
    folder = text_models.write_model(tmp_path, json.dumps(data), {})
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<think>"}))
    ends = {ids["<think>"], ids["<|endoftext|>"], ids["<|im_end|>"]}
    assert Tokenizer.load(folder).end_ids == ends
    for added_token in data["added_tokens"]:
        added_token["special"] = False
    text_models.write_model(tmp_path, json.dumps(data), {})
    assert Tokenizer.load(folder).end_ids == ends
    data["added_tokens"] = [
        added_token for added_token in data["added_tokens"] if added_token["content"] != "<|im_end|>"
    ]
    spare = len(data["model"]["vocab"])
    data["model"]["vocab"]["<|eot_id|>"] = spare
    data["added_tokens"] = []
    text_models.write_model(tmp_path, json.dumps(data), {})
    (folder / "special_tokens_map.json").unlink()
    made = Tokenizer.load(folder)
    assert made.end_ids == {spare} == made.special_ids and made.encode("<|eot_id|>") != [spare]


def test_ends_are_known_by_text() -> None:
    words = {text: number for number, text in enumerate((*sorted(UNMISTAKABLE), "</s>", "<reponame>", "x"))}
    plain = known_ends(words.get, lambda _: False)
    controls = known_ends(words.get, lambda _: True)
    assert words["<|im_end|>"] in plain and words["<|file_sep|>"] in plain and words["<|end|>"] not in plain
    assert words["</s>"] not in plain and {words["</s>"], words["<reponame>"]} <= set(controls)
    assert words["x"] not in controls
    assert known_middle({"<PRE>": 1, "<SUF>": 2, "<MID>": 3}) == (1, 2, 3) and known_middle({"<PRE>": 1}) is None


def test_a_tag_of_html_that_a_vocabulary_holds_ends_nothing(tmp_path: Path) -> None:
    """Unless the file declares it a control token or an end token, or the template ends turns with it."""
    tag = "</s>"
    html = CHATML + "<s></s>"
    for kind, template, ends in (
        (USER, html, False),
        (CONTROL, html, True),
        (USER, FINIS.replace("finis", "x"), False),
    ):
        path = write_scripted(tmp_path / "m.gguf", ["x"], kinds={"<s>": kind, tag: kind}, template=template)
        tokenizer, gguf = Tokenizer.load(path), read_gguf(path)
        number = tokenizer.token_id(tag)
        assert (number in tokenizer.end_ids) == (number in gguf_spec(gguf).eos_ids) == ends
    named = write_scripted(
        tmp_path / "m.gguf", ["x"], kinds={tag: USER, "<s>": USER}, extra={"tokenizer.ggml.eos_token_id": number}
    )
    tokenizer = Tokenizer.load(named)
    assert tokenizer.eos_id in tokenizer.end_ids and gguf_spec(read_gguf(named)).eos_ids[0] == tokenizer.eos_id


@pytest.mark.parametrize(("template", "ends"), [(CHATML, False), (CHATML.replace("<|im_end|>", "</s>"), True)])
def test_a_tag_of_html_ends_an_answer_where_the_template_ends_turns_with_it(
    template: str, ends: bool, tmp_path: Path
) -> None:
    pieces = ["a", "</s>", "b"]
    path = write_scripted(tmp_path / "m.gguf", pieces, kinds={"</s>": USER}, template=template)
    assert said(path) == ("a" if ends else "a</s>b", "stop")


def test_gemmas_tags_of_html_end_nothing() -> None:
    """It takes seconds: the vocabulary has 262,144 tokens."""
    path = gemma3()
    tokenizer, gguf = Tokenizer.load(path), read_gguf(path)
    texts = {tokenizer.decode([i], skip_special=False) for i in tokenizer.end_ids}
    assert texts == {"<eos>", "<end_of_turn>"}
    assert tokenizer.end_ids == set(_ends(gguf, tokenizer.vocab_size))
    assert tokenizer.decode(tokenizer.encode("<s>old</s>", special=True)) == "<s>old</s>"


ROLES = "System: Be kind.END\n{% for m in messages %}{{ m.role }}: {{ m.content }}END\n{% endfor %}"
TURNS = {
    "chatml": (CHATML, "<|im_end|>"),
    "a system of its own": ("<|im_start|>system\nx<|im_end|>\n" + CHATML, "<|im_end|>"),
    "roles as text": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% if m.role == 'assistant' %}<|endoftext|>{% endif %}\n{% endfor %}",
        "<|endoftext|>",
    ),
    "a system of its own, roles as text": (ROLES.replace("END", "<|im_end|>"), "<|im_end|>"),
    "and an end that the file does not name": (ROLES.replace("END", "<|endoftext|>"), "<|endoftext|>"),
    "a system as text, and only the next turn": (
        "Be kind.{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|im_end|>' }}{{ m.content }}"
        "{% endfor %}",
        None,
    ),
    "nothing": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
    "only the next turn": ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", None),
    "only the next turn, in two": (
        "{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>{{ m.content }}{% endfor %}",
        None,
    ),
    "words behind it": ("{% for m in messages %}{{ m.content }} over<|im_end|>{% endfor %}", None),
    "no answers": ("{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}", None),
}


@pytest.mark.parametrize("name", TURNS)
def test_the_end_of_a_turn_is_found_in_the_template(name: str, tmp_path: Path) -> None:
    template, end = TURNS[name]
    tokenizer = Tokenizer.load(write_scripted(tmp_path / "m.gguf", ["x"]))
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, _SAID, strict=True)]
    text = jinja2.Template(template).render(messages=messages, add_generation_prompt=True)
    assert turn_ends(text, tokenizer) == ({tokenizer.controls.ids[end]} if end else set())


# -- refused before anything is built ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_an_architecture_that_is_not_built_is_refused_before_the_tokenizer_is(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "gguf":
        place = write_scripted(tmp_path / "m.gguf", ["x"], extra={"general.architecture": "mamba"})
    else:
        place = text_models.write_model(tmp_path, text_models.byte_level(), text_models.QWEN_CONFIG)
        (place / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))

    def load(*_: Any) -> Tokenizer:
        raise AssertionError("the tokenizer was built")

    monkeypatch.setattr(Tokenizer, "load", load)
    with pytest.raises(ModelError, match=r"the architecture 'Mamba.*|'mamba' is not supported"):
        load_text(place)
