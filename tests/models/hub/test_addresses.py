"""The forms in which people paste a model's name."""

from pathlib import Path

import pytest

from cairn.models.hub import hub
from cairn.models.hub.addresses import plain
from cairn.types.errors import ModelError

HUB = "https://huggingface.co/"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("hf.co/org/name", "org/name"),
        ("hf.co/org/name:Q4_K_M", "org/name:Q4_K_M"),
        ("HF.co/org/name", "org/name"),
        ("huggingface.co/org/name", "org/name"),
        ("hf://org/name:Q8_0", "org/name:Q8_0"),
        ("hf:org/name", "org/name"),
        (HUB + "org/name", "org/name"),
        (HUB + "org/name/", "org/name"),
        (HUB + "org/name/tree/main", "org/name"),
        (HUB + "org/name/tree/main/folder", "org/name"),
        (HUB + "org/name/blob/main/m-Q4_K_M.gguf", "org/name:m-Q4_K_M"),
        (HUB + "org/name/resolve/main/m-Q4_K_M.gguf?download=true", "org/name:m-Q4_K_M"),
        (HUB + "org/name/blob/main/Q8_0/m-00001-of-00002.gguf", "org/name:m"),
        (HUB + "org/name/blob/main/my%20model.gguf", "org/name:my model"),
        ("file:///a/b/m.gguf", "/a/b/m.gguf"),
        ("file://localhost/a/b%20c", "/a/b c"),
        ("file:m.gguf", "m.gguf"),
    ],
)
def test_an_address_is_the_name_that_it_means(given, meant):
    assert plain(given, {}) == meant


@pytest.mark.parametrize("name", ["demo", "org/name", "org/name:Q4_K_M", "folder/hf.co", "./m.gguf", "/a/b", "", "a:b"])
def test_a_name_is_unchanged(name):
    assert plain(name, {}) == name


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("https://example.com/org/name", "not an address of the hub"),
        ("https://huggingface.co.evil.com/org/name", "not an address of the hub"),
        ("https://[::1/org/name", "not an address"),
        ("ftp://huggingface.co/org/name", "not an address of the hub"),
        (HUB, "names no model"),
        (HUB + "org", "names no model"),
        (HUB + "org/name/discussions/4", "give org/name"),
        (HUB + "org/name/blob/v2/m.gguf", "revision v2"),
        (HUB + "org/name/blob/main/model.safetensors", "give the model instead: org/name"),
        ("file://other/m.gguf", "the machine other"),
    ],
)
def test_an_address_of_no_model_is_refused(given, why):
    with pytest.raises(ModelError, match=why):
        plain(given, {})


def test_a_mirror_is_the_hub_too():
    assert plain("https://mirror.example/org/name", {"HF_ENDPOINT": "https://mirror.example"}) == "org/name"


def test_addresses_are_located(tmp_path: Path):
    file = tmp_path / "m 1.gguf"
    file.write_bytes(b"GGUF")
    assert hub.locate(f"file://{tmp_path}/m%201.gguf") == file
    with pytest.raises(ModelError, match=r"get it with: cairn pull org/name$"):
        hub.locate(HUB + "org/name", {"HF_HUB_CACHE": str(tmp_path)})


def test_a_folder_that_holds_one_gguf_model_is_that_model(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "mmproj-m.gguf").write_bytes(b"GGUF")
    for name in ("m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert hub.locate(str(tmp_path)) == tmp_path / "m-Q8_0-00001-of-00002.gguf"
    (tmp_path / "m-Q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"several models; give one of them: m-Q4_0\.gguf, m-Q8_0-00001"):
        hub.locate(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert hub.locate(str(tmp_path)) == tmp_path
