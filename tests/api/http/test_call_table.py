import pytest

from cairn.api.http.event_log import KEEP_CALLS, KEEP_SECONDS, CallTable, parse_id
from cairn.types.errors import Conflict


class Hands:
    """A clock that a test sets."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def time_ns(self) -> int:
        return int(self.time * 1e9)


def test_calls_are_found_while_they_run_and_after() -> None:
    registry = CallTable(Hands())
    registry.open(1, [1, 2, 3])
    registry.open(9, [9])
    assert registry.ids(1) == (1, 2, 3) and registry.ids(9) == (9,) and registry.ids(5) == (5,)
    registry.close(1)
    registry.close(9)
    registry.close(5)
    assert registry.ids(1) == (1, 2, 3)


def test_ended_calls_are_forgotten() -> None:
    """Known failure 11: at most 1,000 of them for at most ten minutes; running calls are never forgotten."""
    clock = Hands()
    registry = CallTable(clock)
    registry.open(10**9, [10**9, 1])
    for number in range(KEEP_CALLS + 1):
        registry.open(number, [number, -number - 1])
        registry.close(number)
    assert registry.ids(0) == (0,) and registry.ids(1) == (1, -2)
    clock.time = KEEP_SECONDS + 1
    registry.open(5000, [5000, 5001])
    registry.close(5000)
    assert registry.ids(1) == (1,) and registry.ids(5000) == (5000, 5001) and registry.ids(10**9) == (10**9, 1)


@pytest.mark.parametrize("ends", [(1, 2), (2, 1)])
@pytest.mark.parametrize("apart", [0.0, 2 * KEEP_SECONDS])
def test_a_name_that_calls_had_at_once_is_forgotten_with_the_last_of_them(ends: tuple[int, int], apart: float) -> None:
    """Whichever ends first, also where one of them still runs after the other was forgotten."""
    clock = Hands()
    registry = CallTable(clock)

    def another(number: int) -> None:
        registry.open(number, [number, number + 1])
        registry.close(number)

    registry.open(1, [1], name="x", salt=b"ada")
    registry.open(2, [2], name="x", salt=b"ada")
    registry.close(ends[0])
    clock.time += apart
    another(10)
    with pytest.raises(Conflict):
        registry.find("x", b"ada")
    registry.close(ends[1])
    assert registry.find("x", b"ada") == 2
    clock.time += KEEP_SECONDS + 1
    another(20)
    assert registry.find("x", b"ada") is None and not registry._names


def test_ids() -> None:
    assert (
        parse_id("00000000000000ff")
        == parse_id("chatcmpl-00000000000000ff")
        == parse_id("cmpl-00000000000000ff")
        == 255
    )
    for wrong in (
        "",
        "ff",
        "00000000000000FF",
        "chatcmpl-",
        "00000000000000fg",
        "0x000000000000ff",
        "-0000000000000ff",
    ):
        assert parse_id(wrong) is None
