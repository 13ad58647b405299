"""YAML files: plain values as in JSON, in bounded time, however the file was crafted."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from cairn.cli import yaml_files
from cairn.cli.yaml_files import MAX_YAML, checking, load_yaml, place_of
from cairn.teams.scenario import scenario_of
from cairn.types.errors import CairnError, ConfigError, InvalidRequest
from cairn.workflows.definition import workflow_of

SECONDS = 5.0
"""Limit in CPU seconds for a file of 4 MiB."""


def load(folder: Path, text: str) -> Any:
    path = folder / "file.yaml"
    path.write_text(text)
    return load_yaml(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a", "a"),
        ("'1'", "1"),
        ("[1, -2, +3, 1.5, 1e3, .5, 0, 0x1f]", [1, -2, 3, 1.5, 1000.0, 0.5, 0, 31]),
        ("[true, yes, On, FALSE, no, off, null, ~, ]", [True, True, True, False, False, False, None, None]),
        ("[1:30, 2001-01-01, 1_000, 0755]", ["1:30", "2001-01-01", "1_000", "0755"]),
        ("[.inf, .nan, 1., '', +, -, ., 0x, 1e]", [".inf", ".nan", 1.0, "", "+", "-", ".", "0x", "1e"]),
        ("{a: , 1: x, true: y, 'b': {}}", {"a": None, "1": "x", "true": "y", "b": {}}),
        ("a: |\n  x\n  y\nb: >\n  x\n  y\n", {"a": "x\ny\n", "b": "x y\n"}),
        ("[!!str 5, !!int '5', ! 5, !!null '']", ["5", 5, "5", None]),
        ("a: &x [1, {b: 2}]\nc: *x\nd: &y z\ne: *y", {"a": [1, {"b": 2}], "c": [1, {"b": 2}], "d": "z", "e": "z"}),
        ("a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}\nc: {q: 4, <<: [{q: 5, r: 6}, *x]}",
         {"a": {"p": 1, "q": 2}, "b": {"p": 1, "q": 3}, "c": {"p": 1, "q": 4, "r": 6}}),
        ("--- a\n...\n", "a"),
    ],
)  # fmt: skip
def test_a_file_holds_plain_values(tmp_path: Path, text: str, value: Any) -> None:
    result = load(tmp_path, text)
    assert json.dumps(result, allow_nan=False, sort_keys=True) == json.dumps(value, sort_keys=True)


def drawn(rng: random.Random, depth: int = 0) -> Any:
    if depth < 4 and rng.random() < 0.5:
        many = range(rng.randrange(4))
        if rng.random() < 0.5:
            return [drawn(rng, depth + 1) for _ in many]
        return {f"k{at}": drawn(rng, depth + 1) for at in many}
    return rng.choice(
        [None, True, False, 0, 17, -3, 1.25, "", "a", "yes", "1", "1.5", "a: b", "- x", "# no", "é\n\n x", "null"]
    )


def test_written_yaml_is_read_back(tmp_path: Path) -> None:
    for seed in range(300):
        value = drawn(random.Random(seed))
        assert load(tmp_path, yaml.safe_dump(value, allow_unicode=bool(seed % 2))) == value, seed
        assert load(tmp_path, json.dumps(value)) == value, seed


def alias_bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    return "\n".join([*lines, *(f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]" for at in range(1, levels))])


def merge_bomb(levels: int) -> str:
    lines = ["a0: &a0 {k: 1}"]
    for at in range(1, levels):
        lines.append(f"a{at}: &a{at} {{<<: [{', '.join([f'*a{at - 1}'] * 50)}], k{at}: 1}}")
    return "\n".join(lines)


BOMBS: dict[str, tuple[str, str]] = {
    "base 60": ("1" + ":1" * 300_000, ""),
    "base 60, long": ("1" + ":1" * 2_000_000, ""),
    "digits": ("9" * 4_000_000, "a number has 4000000 characters; the limit is 400"),
    "digits of a float": ("1." + "9" * 4_000_000, "the limit is 400"),
    "exponent": ("1e" + "9" * 4_000_000, "the limit is 400"),
    "large exponent": ("1e999", "beyond the range of a 64-bit float"),
    "hexadecimal": ("0x" + "f" * 4_000_000, ""),
    "underscores": ("1_" * 2_000_000, ""),
    "date": ("2001-01-01 " + " " * 2_000_000 + "1", ""),
    "depth of lists": ("[" * 4_000_000, "nested deeper than 64 levels, the limit"),
    "depth of objects": ("{a: " * 1_000_000, "nested deeper than 64 levels, the limit"),
    "depth of lines": ("- " * 2_000_000 + "a", "nested deeper than 64 levels, the limit"),
    "depth of keys": ("? " * 2_000_000 + "a", "a key must be a text"),
    "aliases": (alias_bomb(9), "more than 262144 values, the limit"),
    "merges": (merge_bomb(400), "more than 262144 values, the limit"),
    "an alias of itself": ("&a [*a]", "is not defined, or refers to itself"),
    "unknown alias": ("*a", "undefined alias|is not defined"),
    "values": ("- a\n" * 1_000_000, "more than 262144 values, the limit"),
    "empty values": ("[" + "," * 4_000_000 + "]", ""),
    "keys": ("".join(f"k{at}: 1\n" for at in range(300_000)), "more than 262144 values, the limit"),
    "keys in one line": ("{" + ",".join(f"k{at}" for at in range(400_000)) + "}", "more than 262144 values"),
    "a key twice": ("a: 1\na: 2", "the key 'a' is there twice"),
    "a list as a key": ("[a]: 1", "a key must be a text"),
    "an object as a key": ("{{a: 1}: 2}", "a key must be a text"),
    "anchors": ("".join(f"- &a{at} x\n" for at in range(260_000)), ""),
    "folded lines": ("a: >\n" + " x\n" * 1_300_000, ""),
    "empty lines": ("'a" + "\n\n" * 2_000_000 + "'", ""),
    "escapes": ('"' + "\\x41" * 1_000_000 + '"', ""),
    "blanks": (" " * 4_000_000, ""),
    "words": ("a: " + "b " * 2_000_000, ""),
    "indents": ("".join(" " * at + "a:\n" for at in range(2_000)), "nested deeper than 64 levels"),
    "a comment": ("# " + "x" * 4_000_000, ""),
    "comments": ("# x\n" * 1_000_000, ""),
    "a tag": ("!" + "x" * 2_000_000 + " a", "the tag !xxx"),
    "tags of Python": ("!!python/object/apply:os.system ['true']", "is not supported"),
    "directives": ("%FOO a\n" * 500_000 + "--- a", ""),
    "documents": ("--- a\n" * 500_000, "a second document"),
    "open quotes": ("'" * 3_999_999, ""),
    "an open flow": ("[a,\n" * 900_000, "nested deeper than 64 levels"),
    "not UTF-8": ("\udc80", "UTF-8|utf-8"),
    "a null": ("a\0b", "special characters|control characters"),
    "too large": ("#" * (MAX_YAML + 1), "the limit is 4194304"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_hostile_file_is_read_or_refused_soon(tmp_path: Path, name: str) -> None:
    text, said = BOMBS[name]
    path = tmp_path / "file.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    began = time.process_time()
    try:
        load_yaml(path)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    assert time.process_time() - began < SECONDS
    assert len(refused) < 600
    if said:
        assert any(part in refused for part in said.split("|")), refused


def test_the_parser_in_python_reads_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML may be built without libyaml."""
    texts = [alias_bomb(3), "a: &x [1, {b: 2}]\nc: *x", "[" * 100, "1" + ":1" * 1000, "a: 1\na: 2"]

    def found() -> list[Any]:
        answers = []
        for text in texts:
            try:
                answers.append(load(tmp_path, text))
            except ConfigError as error:
                answers.append(str(error))
        return answers

    with_library = found()
    monkeypatch.delattr(yaml, "CSafeLoader")
    assert found() == with_library
    assert yaml_files.MAX_YAML_DEPTH == 64


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: [1, 2\n", "line 3, column 1: cannot be read as YAML"),
        ("a: 1\n  b: 2\n", "line 2, column 4: cannot be read as YAML"),
        (
            "a: 1\nb:\n  - {c: 1, c: 2}\n",
            "line 3, column 12: cannot be read as YAML: the key 'c' is there twice",
        ),
        ("a: [!!set {x}]\n", "line 1, column 5: cannot be read as YAML: the tag"),
    ],
)
def test_unreadable_yaml_is_reported_with_line_and_column(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'file.yaml'}, {said}")


WORKFLOW = """\
name: x
nodes:
  - id: plan
    prompt: "{{ inputs.task }}"
  - id: again
    loop:
      limit: 2
      nodes: [{id: fix, prompt: "{{ plam }}"}]
  - &same {id: last, prompt: hi}
  - *same
"""


@pytest.mark.parametrize(
    ("field", "place"),
    [
        ("plan.prompt", "line 4, column 5"),
        ("fix.prompt", "line 8, column 25"),
        ("nodes[0].prompt", "line 4, column 5"),
        ("$.nodes[1].loop.limit", "line 7, column 7"),
        ("nodes.last", "line 9, column 5"),
        ("plan.needs", "line 3, column 5"),  # unknown field
        ("nodes[9].prompt", "line 2, column 1"),
        ("nothing", ""),
    ],
)
def test_a_field_is_found_in_its_file(tmp_path: Path, field: str, place: str) -> None:
    (tmp_path / "file.yaml").write_text(WORKFLOW)
    assert place_of(tmp_path / "file.yaml", field) == place


def test_an_unknown_key_is_reported_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    for text, read in (
        ("team: {}\nrounds: 1\nagents: []\n", lambda given: scenario_of(given, path)),
        (WORKFLOW + "nods: 1\n", workflow_of),
    ):
        path.write_text(text)
        with pytest.raises(CairnError) as caught, checking(path):
            read(load_yaml(path))
        line = f"line {len(text.splitlines())}, column 1"
        assert str(caught.value).startswith(f"{path}, {line}: ") and "unknown field" in str(caught.value)


def test_a_refused_value_is_reported_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(WORKFLOW)
    with pytest.raises(InvalidRequest) as caught, checking(path):
        raise InvalidRequest(f"{path}: unknown dependency", field="fix.prompt")
    assert str(caught.value) == f"{path}, line 8, column 25: unknown dependency" and caught.value.field == "fix.prompt"
    with pytest.raises(ConfigError, match=r"^no field$"), checking(path):
        raise ConfigError("no field")
