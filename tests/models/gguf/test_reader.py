"""GGUF files are read within bounds: completely, or refused in one sentence that names the file and the place."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from cairn.models.gguf.reader import read_gguf
from cairn.models.hub import hub
from cairn.models.safetensors.weights import expected_tensors, open_weights
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError, ModelFileError
from tests.gguf_files import write_gguf
from tests.tiny_models import write_model

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def described(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(entries: list[bytes], tensors: list[bytes], version: int = 3) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(entries))
    return b"GGUF" + counts + b"".join(entries) + b"".join(tensors)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_gguf(write_model(tmp_path / "model", "LlamaForCausalLM"), tmp_path / "tiny.gguf")


def test_everything_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    extra = {"a.numbers": [1, -2, 3], "a.floats": [0.5, 1e-6], "a.texts": ["x", "", "ß"], "a.flag": True, "a.eps": 1e-6}
    folder = write_model(tmp_path / "model", hidden_size=64, intermediate_size=96)
    path = write_gguf(folder, tmp_path / "tiny.gguf", kind=Type.Q8_0, extra=extra)
    read, theirs = read_gguf(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = read.metadata[key]
            value = value.tolist() if isinstance(value, np.ndarray) else value
            assert value == pytest.approx(field.contents()) if key == "a.floats" else True
            if not isinstance(value, float) and key != "a.floats":
                assert value == field.contents(), key
    assert read.metadata["a.eps"] == 1e-6 and read.metadata["a.flag"] is True
    assert {tensor.name for tensor in theirs.tensors} == set(read.tensors)
    for tensor in theirs.tensors:
        ours = read.tensors[tensor.name]
        assert (ours.kind.name, ours.shape, ours.begin) == (
            tensor.tensor_type.name,
            tuple(tensor.shape.tolist()[::-1]),
            tensor.data_offset,
        )
        assert read.blocks(tensor.name).tobytes() == tensor.data.tobytes()
        with pytest.raises(ValueError, match="read-only"):
            read.blocks(tensor.name)[0] = 1


def test_parts_are_one_model_whichever_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    whole = write_gguf(folder, tmp_path / "whole.gguf")
    first = write_gguf(folder, tmp_path / "split.gguf", parts=3)
    third = Path(str(first).replace("00001-of", "00003-of"))
    spec = load_spec(whole)
    assert load_spec(third).name == "split" and load_spec(third).identity == load_spec(first).identity != spec.identity
    for path in (first, third):
        got, want = open_weights(path, load_spec(path)), open_weights(whole, spec)
        assert set(got) == set(want) == set(expected_tensors(spec))
        assert all(np.array_equal(got[name], want[name]) for name in want)
    second = Path(str(first).replace("00001-of", "00002-of"))
    kept = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(ModelFileError, match=r"split\.no must be 1, as the file's name says, found 2"):
        load_spec(first)
    second.unlink()
    with pytest.raises(ModelFileError, match=r"00002-of-00003\.gguf: the file is missing, and .* is one of 3 parts"):
        load_spec(first)
    (tmp_path / "alone.gguf").write_bytes(first.read_bytes())
    with pytest.raises(ModelFileError, match="is one part of a split model"):
        load_spec(tmp_path / "alone.gguf")
    second.write_bytes(kept)
    load_spec(first)


ALIGNED = entry("general.alignment", U32, struct.pack("<I", 32))
A = described("a", (32,), 0, 0)
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file"),
    "other": (b"PK\3\4" + bytes(60), "not a GGUF file"),
    "short": (b"GGUF\3\0\0\0", "not a GGUF file"),
    "version": (header([], [], 1), "has version 1; supported is GGUF of versions 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0), "announces 9223372036854775808 tensors, more than"),
    "many entries": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "metadata entries, more than"),
    "missing entry": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1),
        "truncated: a value from byte 24 of the header ends at byte 32, but",
    ),
    "long key": (
        header([struct.pack("<Q", 1 << 60) + bytes(99)], []),
        "at byte 24: a metadata key has 1152921504606846976",
    ),
    "long text": (header([entry("k", STRING, struct.pack("<Q", 1 << 50))], []), "at byte 37: the value of 'k' has "),
    "text past the end": (
        header([entry("k", STRING, struct.pack("<Q", 1 << 20))], []),
        "truncated: a value from byte",
    ),
    "not text": (header([entry("k", STRING, text(b"\xff\xfe"))], []), "at byte 37: the value of 'k' is not UTF-8"),
    "unknown kind": (header([entry("k", 77, b"")], []), "the value of 'k' has the unknown type 77"),
    "a third truth": (header([entry("k", BOOL, b"\2")], []), "'k' must be true or false, found 2"),
    "long array": (
        header([entry("k", ARRAY, struct.pack("<IQ", U64, 1 << 62))], []),
        "the array 'k' has 4611686018427387904 elements; all arrays together may have",
    ),
    "array past the end": (header([entry("k", ARRAY, struct.pack("<IQ", U64, 1 << 23))], []), "truncated"),
    "deep array": (
        header([entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1 << 20) + struct.pack("<IQ", U64, 0) * (1 << 20))], []),
        "the array 'k' has elements of the type 9, expected numbers, booleans or strings",
    ),
    "many texts": (
        header([entry("k", ARRAY, struct.pack("<IQ", STRING, (1 << 20) + 1) + bytes(8 << 20))], []),
        "the array 'k' has 1048577 strings, more than 1048576",
    ),
    "key twice": (header([ALIGNED, ALIGNED], []), r"the metadata key 'general\.alignment' appears twice"),
    "alignment": (
        header([entry("general.alignment", U32, struct.pack("<I", 12))], []),
        "must be a multiple of 8, found 12",
    ),
    "no dimensions": (header([], [described("a", (), 0, 0)]), "the tensor 'a' has 0 dimensions"),
    "five dimensions": (header([], [described("a", (1,) * 5, 0, 0)]), "the tensor 'a' has 5 dimensions"),
    "no numbers": (header([], [described("a", (0, 3), 0, 0)]), r"has the dimensions \[0, 3\], expected each from 1"),
    "huge": (header([], [described("a", (1 << 40,) * 4, 0, 0)]), r"ends at byte \d+, but the file is truncated at"),
    "type": (
        header([], [described("a", (32,), 99, 0)]),
        "has the type number 99, which is not supported; supported are F32",
    ),
    "type with a name": (header([], [described("a", (64,), 40, 0)]), "has the type NVFP4, which is not supported"),
    "half a block": (
        header([], [described("a", (33,), 8, 0)]),
        r"rows of 33 values, expected a multiple of 32 \(Q8_0\)",
    ),
    "no data": (header([], [A]), "the tensor 'a' ends at byte 192, but the file is truncated at"),
    "unaligned": (
        header([], [described("a", (32,), 0, 8)]) + bytes(999),
        "starts at byte 8, expected a multiple of 32",
    ),
    "overlap": (
        header([], [A, described("b", (32,), 0, 32)]) + bytes(999),
        "the tensor 'b' starts at byte 32, where another one ends at 128",
    ),
    "twice": (header([], [A, described("a", (32,), 0, 128)]) + bytes(999), "the tensor 'a' appears twice"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_is_a_short_error_with_its_place(name: str, tmp_path: Path) -> None:
    """Known failure 30."""
    data, sentence = FILES[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=sentence) as caught:
        read_gguf(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_every_cut_of_a_file_is_seen(tiny: Path) -> None:
    """A truncated file must not be trusted (known failure 30)."""
    whole = tiny.read_bytes()
    data = min(tensor.begin for tensor in read_gguf(tiny).tensors.values())
    for size in [*range(0, data, 7), *range(data, len(whole), 997), len(whole) - 33]:
        tiny.write_bytes(whole[:size])
        with pytest.raises(ModelFileError, match=r"tiny\.gguf: "):
            read_gguf(tiny)


YARN = (("type", "yarn"), ("factor", 4.0))

KEYS: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "no architecture": ({}, ("general.architecture",), r"general\.architecture must be the name of an architecture"),
    "architecture": (
        {"general.architecture": "mamba"},
        (),
        "the architecture 'mamba' is not supported; supported are apertus, bert, cohere2, command-r, deepseek2",
    ),
    "architectures": (
        {"general.architecture": [1.5, 2.5]},
        (),
        r"general\.architecture must be a string, found array",
    ),
    "experts": ({"llama.expert_count": 8}, (), r"llama\.expert_used_count must be a whole number from 1 to 8"),
    "softcap": ({"llama.attn_logit_softcapping": 30.0}, (), "attn_logit_softcapping is set"),
    "heads by layer": (
        {"llama.attention.head_count_kv": [2, 1]},
        (),
        r"head_count_kv must be a whole number .*\[2, 1\]|found",
    ),
    "missing": ({}, ("llama.block_count",), r"llama\.block_count must be a whole number from 1 to 4096, found nothing"),
    "layers": ({"llama.block_count": 1}, (), r"the tensor 'blk\.1\.\w+\.weight' is not part of a llama"),
    "more layers": ({"llama.block_count": 3}, (), r"the tensor for model\.layers\.2\..* of shape .* is missing"),
    "width": ({"llama.feed_forward_length": 81}, (), r"ffn_\w+\.weight has the shape .* from the metadata"),
    "hidden": ({"llama.embedding_length": 49}, (), r"token_embd\.weight must be \[tokens, 49\], found the shape"),
    "partial rotation": ({"llama.rope.dimension_count": 6}, (), "rope.dimension_count other than the head size 12"),
    "scaling": ({"llama.rope.scaling.type": "longrope"}, (), "rope scaling 'longrope' is not supported"),
    "yarn that extends nothing": (
        {f"llama.rope.scaling.{name}": one for name, one in (*YARN, ("yarn_ext_factor", 0.0))},
        (),
        r"yarn_ext_factor is set, which is not supported",
    ),
    "positions that are extended without yarn": (
        {"llama.rope.scaling.yarn_ext_factor": 1.0},
        (),
        r"yarn_ext_factor is set, which is not supported",
    ),
    "scores without a scale": (
        {f"llama.rope.scaling.{name}": one for name, one in (*YARN, ("yarn_attn_factor", 0.0))},
        (),
        r"yarn_attn_factor is set, which is not supported",
    ),
    "not causal": ({"llama.attention.causal": False}, (), "such a model does not generate text"),
    "tokens": ({"tokenizer.ggml.tokens": ["x"] * 161}, (), "161 tokens, but the embedding has 160 rows"),
    "tokens in tokens": (
        {"tokenizer.ggml.tokens": [["a"], ["b"]], "tokenizer.ggml.token_type": [3, 3]},
        (),
        r"the array 'tokenizer\.ggml\.tokens' has elements of the type 9, expected numbers, booleans or strings",
    ),
    "tokenizers": ({"tokenizer.ggml.model": [1, 2]}, (), r"tokenizer\.ggml\.model must be a string, found array"),
    "hot": ({"general.sampling.temp": "hot"}, (), r"general\.sampling\.temp must be a number"),
    "layout": (
        {"llama.tensor_data_layout": "reference"},
        (),
        r"llama\.tensor_data_layout is set, which is not supported",
    ),
    "eos": ({"tokenizer.ggml.eos_token_id": 160}, (), r"eos_token_id must be a token id .*below 160"),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_files_facts_about_its_model_are_checked(name: str, tmp_path: Path) -> None:
    """Known failure 30."""
    extra, without, sentence = KEYS[name]
    folder = write_model(tmp_path / "model", "LlamaForCausalLM")
    path = write_gguf(folder, tmp_path / "m.gguf", extra=extra, without=without)
    if name == "no architecture":
        path.write_bytes(path.read_bytes().replace(b"general.architecture", b"general.architectura"))
    with pytest.raises(ModelError, match=sentence) as caught:
        open_weights(path, load_spec(path))
    assert str(caught.value).startswith(f"{path}: ")


def test_one_value_for_all_layers_and_neutral_settings_are_accepted(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "LlamaForCausalLM")
    extra = {"llama.attention.head_count_kv": [2, 2], "llama.expert_count": 0, "llama.attention.sliding_window": 24}
    extra |= {"general.sampling.temp": 0.5, "general.sampling.top_k": 7, "tokenizer.ggml.eot_token_id": 5}
    extra |= {"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eom_token_id": (1 << 32) - 1}
    extra |= {"llama.tensor_data_layout": "Meta AI original pth"}
    spec = load_spec(write_gguf(folder, tmp_path / "m.gguf", extra=extra))
    assert (spec.kv_heads, spec.groups[0].window, spec.eos_ids) == (2, 24, (3, 5))
    assert spec.defaults == {"temperature": 0.5, "top_k": 7}


def test_the_identity_of_a_file_is_its_content_not_its_name(tiny: Path, tmp_path: Path) -> None:
    """A file that was renamed, or is reached by a link, still has its KV (known failure 27)."""
    before = load_spec(tiny).identity
    (tmp_path / "link.gguf").symlink_to(tiny)
    assert load_spec(tmp_path / "link.gguf").identity == before
    assert load_spec(tiny.rename(tmp_path / "renamed.gguf")).identity == before


def test_the_identity_is_of_every_byte(tiny: Path) -> None:
    """Known failure 28."""
    before = load_spec(tiny).identity
    data = bytearray(tiny.read_bytes())
    data[-40] ^= 1
    tiny.write_bytes(data)
    assert load_spec(tiny).identity != before
    assert load_spec(tiny, identify=False).identity == b""


def test_names_of_files(tmp_path: Path) -> None:
    assert hub.model_name(tmp_path / "Qwen3-Q4_K_M.gguf") == "Qwen3-Q4_K_M"
    assert hub.model_name(tmp_path / "big-00002-of-00003.gguf") == "big"
    snapshot = tmp_path / "models--org--m" / "snapshots" / ("a" * 40)
    assert hub.model_name(snapshot / "m-Q8_0.gguf") == "org/m:m-Q8_0"


def test_a_file_that_shrank_is_an_error_not_a_crash(tiny: Path) -> None:
    weights = open_weights(tiny, load_spec(tiny))
    tiny.write_bytes(tiny.read_bytes()[:-5000])
    with pytest.raises(ModelFileError, match="became shorter"):
        for name in weights:
            weights[name].sum()


@pytest.mark.parametrize("kind", [3, 1])
def test_sentencepiece_without_named_tokens_has_those_of_llama_cpp(kind: int, tmp_path: Path) -> None:
    """Without an end token an answer would go on for ever."""
    folder = write_model(tmp_path / "model", "LlamaForCausalLM", tie_word_embeddings=True)
    texts = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a"]}
    texts |= {"tokenizer.ggml.token_type": [2, kind, kind, 1]}
    spec = load_spec(write_gguf(folder, tmp_path / "m.gguf", extra=texts))
    assert (spec.bos_id, spec.eos_ids) == ((1, (2,)) if kind == 3 else (None, ()))
    texts |= {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 3}
    spec = load_spec(write_gguf(folder, tmp_path / "m.gguf", extra=texts))
    assert (spec.bos_id, spec.eos_ids) == ((0, (3, 2)) if kind == 3 else (0, (3,)))
    spec = load_spec(write_gguf(folder, tmp_path / "m.gguf", extra=texts, without=tuple(texts)))
    assert (spec.bos_id, spec.eos_ids) == (None, ())


SCALINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"type": "linear", "factor": 4.0},
    "yarn that stretches nothing": {"type": "yarn", "factor": 1.0},
    "yarn that shrinks": {"type": "yarn", "factor": 0.5},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_a_factor_on_attention_is_refused_where_it_would_be_ignored(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "LlamaForCausalLM")
    extra = {f"llama.rope.scaling.{key}": value for key, value in SCALINGS[name].items()}
    path = write_gguf(folder, tmp_path / "m.gguf", extra=extra | {"llama.rope.scaling.attn_factor": 1.0})
    assert load_spec(path).rope_scaling.attention_factor is None
    write_gguf(folder, path, extra=extra | {"llama.rope.scaling.attn_factor": 1.5})
    with pytest.raises(ModelError, match=r"llama\.rope\.scaling\.attn_factor is 1\.5, .*supported only with yarn"):
        load_spec(path)


@pytest.mark.parametrize("name", ["yarn_beta_fast", "yarn_beta_slow"])
def test_yarn_parameters_are_absent_or_in_range(name: str, tmp_path: Path) -> None:
    """A value near 0 but not 0 gives a wavelength without a logarithm."""
    folder = write_model(tmp_path / "model", "LlamaForCausalLM")
    key = f"llama.rope.scaling.{name}"
    extra = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    path = write_gguf(folder, tmp_path / "m.gguf", extra=extra)
    plain = load_spec(path).rope_scaling
    write_gguf(folder, path, extra=extra | {key: 0.0})
    assert load_spec(path).rope_scaling == plain
    write_gguf(folder, path, extra=extra | {key: 1e-6})
    assert getattr(load_spec(path).rope_scaling, name.removeprefix("yarn_")) == 1e-6
    for value in (1e-320, 2e6, -1.0):
        write_gguf(folder, path, extra=extra | {key: np.float64(value)})
        with pytest.raises(ModelFileError, match=rf"{name} must be 0, or a number from 1e-06 to 1e\+06"):
            load_spec(path)


def test_a_factor_on_attention_of_yarn_is_used(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "LlamaForCausalLM")
    extra = {"type": "yarn", "factor": 4.0, "attn_factor": 1.5}
    path = write_gguf(
        folder, tmp_path / "m.gguf", extra={f"llama.rope.scaling.{key}": value for key, value in extra.items()}
    )
    assert load_spec(path).rope_scaling.attention_factor == pytest.approx(1.5 * 1.13863, rel=1e-5)


def test_yarn_that_extends_all_is_yarn(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "LlamaForCausalLM")
    yarn = {f"llama.rope.scaling.{name}": one for name, one in YARN}
    plain = load_spec(write_gguf(folder, tmp_path / "m.gguf", extra=yarn))
    said = load_spec(write_gguf(folder, tmp_path / "m.gguf", extra=yarn | {"llama.rope.scaling.yarn_ext_factor": 1.0}))
    assert plain.rope_scaling == said.rope_scaling
    assert plain.rope_scaling.kind == "yarn"


HARMLESS: dict[str, dict[str, Any]] = {
    "top_p that was rounded": {"general.sampling.top_p": np.float64(1.0000001)},
    "no penalty": {"general.sampling.penalty_repeat": 0.0},
    "greedy": {"general.sampling.temp": -1.0},
    "hot": {"general.sampling.temp": 20.0},
    "bos": {"tokenizer.ggml.bos_token_id": 1 << 20},
    "unknown": {"tokenizer.ggml.unknown_token_id": (1 << 32) - 1},
    "attention scale": {"llama.attention.scale": 12**-0.5},
    "logit scale": {"llama.logit_scale": 1.0},
    "yarn without a word of its extent": {"llama.rope.scaling.yarn_ext_factor": -1.0},
    "nothing extended without yarn": {"llama.rope.scaling.yarn_ext_factor": 0.0},
    "residual scale": {"llama.residual_scale": 1.0, "llama.embedding_scale": 1.0},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_descriptive_metadata_never_refuses_a_file(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "LlamaForCausalLM")
    plain = load_spec(write_gguf(folder, tmp_path / "m.gguf"))
    spec = load_spec(write_gguf(folder, tmp_path / "m.gguf", extra=HARMLESS[name]))
    expected = {"greedy": {"temperature": 0.0}, "top_p that was rounded": {"top_p": 1.0}}
    assert spec.defaults == expected.get(name, {})
    assert msgspec.structs.replace(spec, defaults={}, identity=plain.identity) == plain


@pytest.mark.parametrize("key", ["attention.scale", "logit_scale", "residual_scale", "embedding_scale"])
def test_a_scale_that_would_change_numbers_is_refused(key: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "LlamaForCausalLM")
    path = write_gguf(folder, tmp_path / "m.gguf", extra={f"llama.{key}": 0.5})
    with pytest.raises(ModelError, match=rf"llama\.{key} is set, which is not supported"):
        load_spec(path)


ENDINGS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "one": ({"eos_token_id": 5}, (5,)),
    "an array": ({"eos_token_id": [5, 6]}, (5, 6)),
    "a list beside it": ({"eos_token_id": 5, "eos_token_ids": [6, 7, 5]}, (5, 6, 7)),
    "only a list": ({"eos_token_ids": [6, 7]}, (6, 7)),
    "of turns and messages": ({"eos_token_id": 5, "eot_token_id": 6, "eom_token_id": 7}, (5, 6, 7)),
    "of files": ({"fim_pad_token_id": 5, "fim_rep_token_id": 6, "fim_sep_token_id": 7}, (5, 6, 7)),
    "of the wrong type": ({"eos_token_id": 5, "texts": {8: "<|im_end|>"}}, (5, 8)),
    "user-defined": ({"eos_token_id": 5, "texts": {8: "<|eot_id|>"}, "kinds": {8: 4}}, (5, 8)),
    "of code": ({"texts": {8: "<|fim_pad|>", 9: "<|repo_name|>", 10: "<|file_sep|>"}}, (8, 9, 10)),
    "a piece of HTML": ({"eos_token_id": 5, "texts": {8: "</s>"}}, (5,)),
    "a control token": ({"eos_token_id": 5, "texts": {8: "</s>"}, "kinds": {8: 3}}, (5, 8)),
    "of a thought": ({"eos_token_id": 5, "texts": {8: "<|end|>", 9: "<|return|>"}}, (5, 9)),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_end_tokens_are_those_named_by_the_file_and_those_spelt_alike(name: str, tmp_path: Path) -> None:
    fields, ends = ENDINGS[name]
    folder = write_model(tmp_path / "model", "LlamaForCausalLM")
    tokens, kinds = [f"t{n}" for n in range(20)], [1] * 20
    for number, word in fields.get("texts", {}).items():
        tokens[number] = word
    for number, kind in fields.get("kinds", {}).items():
        kinds[number] = kind
    extra = {f"tokenizer.ggml.{key}": value for key, value in fields.items() if key not in ("texts", "kinds")}
    extra |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.model": "gpt2"}
    assert load_spec(write_gguf(folder, tmp_path / "m.gguf", extra=extra)).eos_ids == ends
