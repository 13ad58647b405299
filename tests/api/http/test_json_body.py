import json
import random
import sys
import threading
import time
import tracemalloc
from typing import Any

import pytest

from cairn.api.http import body as body_module
from cairn.api.http.body import INLINE_BYTES, MOST_DIGITS, has_more, parse_json
from cairn.config.config import Config
from cairn.types.errors import InvalidRequest
from tests.api.scripted import ScriptedService
from tests.api.sockets import site


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


def test_whole_numbers_up_to_the_limit_and_one_digit_more() -> None:
    """Python converts them in quadratic time: a body of long ones would hold up everybody."""
    most = "7" * MOST_DIGITS
    for number in (most, "-" + most):
        assert parse_json(f'{{"a":[{number},1]}}'.encode(), max_depth=64) == {"a": [int(number), 1]}
        with pytest.raises(InvalidRequest, match=f"more than {MOST_DIGITS} digits, the limit"):
            parse_json(f'{{"a":[1,{number}7]}}'.encode(), max_depth=64)
    for value in (most * 20, float("0." + most * 20), [most, 1.5, -3, True, None]):
        assert parse_json(json.dumps({"a": value}).encode(), max_depth=64) == {"a": value}
    assert parse_json(b'{"a":0.' + b"7" * 9_000 + b"}", max_depth=64) == {"a": 0.7777777777777778}


def test_half_surrogates_take_about_as_long_as_other_escapes() -> None:
    def seconds(escape: bytes) -> float:
        body = b'{"a":"' + escape * 300_000 + b'"}'
        began = time.process_time()
        parse_json(body, max_depth=64)
        return time.process_time() - began

    # With an exception for each it took 13 times as long; a busy machine makes one measurement of three slow.
    usual = max(seconds(b"\\u4e00") for _ in range(3))
    assert any(seconds(b"\\ud800") < 7 * usual for _ in range(5))


def plain_count(body: bytes, marks: bytes) -> int:
    """Count marks outside of texts, character by character."""
    found, within, at = 0, False, 0
    while at < len(body):
        if within and body[at : at + 1] == b"\\":
            at += 1
        elif body[at : at + 1] == b'"':
            within = not within
        elif not within and body[at : at + 1] in marks:
            found += 1
        at += 1
    return found


def test_values_are_counted_as_one_by_one() -> None:
    rng = random.Random(1)
    parts = [b'"', b"\\", b"{", b"[", b",", b"a", b'"a,b"', b'\\"', b'"\\\\"', b"," * 1024, b"{" * 1023, b'"",' * 1024]
    for _ in range(300):
        bodies = [b"".join(rng.choices(parts, k=rng.randint(0, 9))) for _ in range(2)]
        many = sum(plain_count(body, b",[{") for body in bodies)
        assert not has_more(bodies, many)
        assert many == 0 or has_more(bodies, many - 1)


def test_values_are_counted_without_a_step_in_python_for_each() -> None:
    body = b'{"a":[' + b'"",' * 100_000
    steps = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal steps
        steps += 1

    sys.setprofile(count)
    try:
        assert has_more([body], 100_001)
    finally:
        sys.setprofile(None)
    assert steps < 10_000


async def test_large_bodies_are_parsed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, parse = list[int](), body_module.parse_json

    def noted(body: bytes, **more: Any) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return parse(body, **more)

    monkeypatch.setattr(body_module, "parse_json", noted)
    async with site(ScriptedService(), Config()) as at, at.http() as http:
        asked = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}).encode()
        headers = {"content-type": "application/json"}
        for blanks, inline in ((0, True), (INLINE_BYTES, False)):
            answer = await http.post("/v1/chat/completions", content=asked + b" " * blanks, headers=headers)
            assert answer.status_code == 200, answer.text
            assert (threads.pop() == threading.get_ident()) is inline
        answer = await http.post("/v1/chat/completions", content=b"{" + b" " * INLINE_BYTES, headers=headers)
        assert answer.status_code == 400 and "not valid JSON" in answer.text
