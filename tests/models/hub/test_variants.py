import pytest

from cairn.models.hub.variants import choose, tags, variants


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen3-0.6B-Q8_0.gguf", "Q8_0"),
        ("qwen2-0_5b-instruct-q4_0.gguf", "Q4_0"),
        ("mistral-7b.Q3_K_S.gguf", "Q3_K_S"),
        ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("m-IQ4_NL.gguf", "IQ4_NL"),
        ("m_MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("m-fp16.gguf", "FP16"),
        ("BF16/m-00001-of-00001.gguf", "BF16"),
        ("Qwen3.gguf", ""),
        ("m-Q4_K_M-imat.gguf", ""),
        ("My Model + Mehr Q4_K_M.gguf", "Q4_K_M"),
        ("Modèle (q8_0).GGUF", "Q8_0"),
        ("Q5_K_M/split/m.gguf", "Q5_K_M"),
        ("m-imatrix-IQ4_XS.gguf", "IQ4_XS"),
        ("m-Q4_K_M-imatrix.gguf", ""),
    ],
)
def test_the_quantisation_is_the_end_of_the_name(name, kind):
    (one,) = variants([name])
    assert (one.type, one.files, one.missing) == (kind, (name,), "")


def test_names_that_are_no_models_or_lead_elsewhere_are_not_seen():
    names = [
        "../m-Q8_0.gguf",
        "/m-Q8_0.gguf",
        "a/b/c/d/e/m-Q8_0.gguf",
        "a/../m-Q8_0.gguf",
        "..",
        ".m.gguf",
        "m.safetensors",
    ]
    names += ["a//m.gguf", "a\\m.gguf", "m\n.gguf", "a/.git/m.gguf", "x" * 250 + ".gguf", "m\udcff.gguf"]
    assert variants([*names, "mmproj-Q8_0.gguf", "m-mmproj-f16.gguf", "m-Q8_0-00000-of-00002.gguf"]) == []


@pytest.mark.parametrize("name", ["imatrix.gguf", "m-imatrix.gguf", "m.imatrix.gguf", "a/imatrix_unsloth.GGUF"])
def test_a_matrix_that_guides_a_quantisation_is_no_model(name):
    assert variants([name]) == []


def test_parts_with_an_ending_in_capitals_are_one_model():
    (one,) = variants(["M-00001-OF-00002.GGUF", "M-00002-OF-00002.GGUF"])
    assert one.stem == "M" and len(one.files) == 2 and one.missing == ""


def test_a_tag_may_be_a_whole_file_name_in_any_case():
    listed = variants(["My Model+é Q4_0.gguf", "a/model.gguf", "b/model.gguf"])
    for tag in ("My Model+é Q4_0", "my model+e\u0301 q4_0.GGUF", "Q4_0"):
        assert [variant.files for variant in choose(listed, tag)] == [("My Model+é Q4_0.gguf",)]
    assert [variant.path for variant in choose(listed, "model")] == ["a/model", "b/model"]
    assert [variant.path for variant in choose(listed, "b/model.gguf")] == ["b/model"]


def test_parts_are_one_model_and_a_missing_one_is_named():
    (whole,) = variants(["m-00002-of-00002.gguf", "m-00001-of-00002.gguf"])
    assert whole.files == ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf") and whole.missing == ""
    (part,) = variants(["x/m-00003-of-00003.gguf", "x/m-00001-of-00003.gguf"])
    assert part.missing == "x/m-00002-of-00003.gguf"


def test_a_tag_is_a_name_before_a_type_and_a_type_before_its_dynamic_twin():
    listed = variants(["a-Q4_K_M.gguf", "a-UD-Q4_K_M.gguf", "a-UD-Q2_K.gguf", "b-Q8_0.gguf", "c-Q8_0.gguf", "Q8.gguf"])
    assert [variant.stem for variant in choose(listed, "q4_k_m")] == ["a-Q4_K_M"]
    assert [variant.stem for variant in choose(listed, "ud-q4_k_m")] == ["a-UD-Q4_K_M"]
    assert [variant.stem for variant in choose(listed, "Q2_K")] == ["a-UD-Q2_K"]
    assert [variant.stem for variant in choose(listed, "Q8_0")] == ["b-Q8_0", "c-Q8_0"]
    assert [variant.stem for variant in choose(listed, "C-q8_0")] == ["c-Q8_0"]
    assert choose(listed, "Q8_1") == [] and choose(listed, "K_M") == []
    assert tags(listed) == "Q8, Q4_K_M, UD-Q2_K, UD-Q4_K_M, Q8_0"


def test_models_that_only_their_folders_tell_apart_are_several():
    listed = variants(["Q4_K_M/model.gguf", "Q8_0/model.gguf"])
    assert [variant.type for variant in choose(listed, "model")] == ["Q4_K_M", "Q8_0"]
    assert [variant.files for variant in choose(listed, "q8_0")] == [("Q8_0/model.gguf",)]


def test_one_file_is_taken_before_the_parts_of_the_same():
    listed = variants(["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf", "m-Q8_0.gguf"])
    assert [variant.files for variant in choose(listed, "Q8_0")] == [("m-Q8_0.gguf",)]
