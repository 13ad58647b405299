import json
import sys
import tracemalloc

import pytest

from cairn.api.http.body import parse_json
from cairn.types.errors import InvalidRequest


def nested(depth: int) -> bytes:
    """Return an object with exactly this depth."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


@pytest.mark.parametrize("depth", [1, 63, 64])
def test_depth_up_to_the_limit_is_parsed(depth: int) -> None:
    body = b"{}" if depth == 1 else nested(depth)
    assert parse_json(body, max_depth=64) == json.loads(body)


@pytest.mark.parametrize("depth", [65, 66, 900, 5_000, 200_000])
def test_deeper_nesting_is_refused(depth: int) -> None:
    with pytest.raises(InvalidRequest, match="deeper than 64"):
        parse_json(nested(depth), max_depth=64)


@pytest.mark.parametrize("body", [b'{"a":1,"a":2}', b'{"x":{"b":1,"c":2,"b":3}}', b'[{"a":1,"a":1}]'])
def test_a_key_given_twice_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="twice"):
        parse_json(body, max_depth=64)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_not_finite_are_refused(number: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_json(f'{{"temperature":{number}}}'.encode(), max_depth=64)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b'"a"',
        b"null",
        b"{'a':1}",
        b'{"a":1}x',
        b'{"a":\xff}',
        b"\xef\xbb\xbf",
        b'{\xef\xbb\xbf"a":1}',
        b'{"\\udc00":1,"\\ud800":1}',
        b'{"a":01}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":"\n"}',
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_json(body, max_depth=64)


def test_a_byte_order_mark_is_ignored() -> None:
    """Some editors and .NET write a byte order mark."""
    assert parse_json(b'\xef\xbb\xbf{"a":1}', max_depth=1, max_values=1) == {"a": 1}


def test_whole_characters_pass() -> None:
    assert parse_json(b'{"a":"\\ud83d\\ude00"}', max_depth=2) == {"a": "\N{GRINNING FACE}"}


@pytest.mark.parametrize(
    ("body", "want"),
    [
        (b'{"a":"\\ud800"}', {"a": "\ufffd"}),
        (b'{"\\udc00":1,"b":2}', {"\ufffd": 1, "b": 2}),
        (b'{"a":["\\ud800x",{"b":"\\ude00\\ud83d"}]}', {"a": ["\ufffdx", {"b": "\ufffd\ufffd"}]}),
    ],
)
def test_half_a_surrogate_pair_is_replaced_and_reported(body: bytes, want: object) -> None:
    heard: list[str] = []
    assert parse_json(body, max_depth=64, warn=heard.append) == want
    assert len(heard) == 1 and "surrogate" in heard[0]


def test_messages_do_not_quote_the_body() -> None:
    """Bodies hold prompts, and error messages may end up in logs."""
    with pytest.raises(InvalidRequest) as caught:
        parse_json(b'{"a": secret-prompt}', max_depth=64)
    assert "secret" not in str(caught.value)


def test_values_up_to_the_limit_and_one_more() -> None:
    for body, values in ((b'{"a":[1,2,3]}', 4), (b'{"a":{},"b":[[],[]]}', 7), (b'{"a":1,"b":2,"c":3}', 3)):
        parse_json(body, max_depth=64, max_values=values)
        with pytest.raises(InvalidRequest, match=f"more than {values - 1} JSON values"):
            parse_json(body, max_depth=64, max_values=values - 1)


def test_commas_and_brackets_in_a_text_are_no_values() -> None:
    text = 'a, b, [c], {d}, "e\\' * 100
    assert parse_json(json.dumps({"a": text}).encode(), max_depth=64, max_values=3) == {"a": text}


def test_a_body_of_tiny_values_is_refused_before_it_is_built() -> None:
    body = b'{"a":[' + b"{}," * 5_000_000 + b"{}]}"
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match="JSON values"):
        parse_json(body, max_depth=64)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_recursion_limit_is_not_needed() -> None:
    limit = sys.getrecursionlimit()
    with pytest.raises(InvalidRequest):
        parse_json(b"[" * 10_000_000, max_depth=64, max_values=1 << 30)
    assert sys.getrecursionlimit() == limit


def test_objects_are_bounded_apart() -> None:
    """Objects have a limit of their own: building model instances from them is the slowest part.

    Braces in strings do not count.
    """
    assert parse_json(b'{"a":["' + b"{" * 100_000 + b'"]}', max_depth=64)
    assert len(parse_json(b'{"a":[' + b"{}," * 32_766 + b"{}]}", max_depth=64)["a"]) == 32_767
    with pytest.raises(InvalidRequest, match="more than 32768 JSON objects, the limit"):
        parse_json(b'{"a":[' + b"{}," * 32_767 + b"{}]}", max_depth=64)
    assert len(parse_json(b'{"a":[' + b"1," * 200_000 + b"1]}", max_depth=64)["a"]) == 200_001
