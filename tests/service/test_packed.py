"""Packed log-probabilities."""

from hypothesis import given
from hypothesis import strategies as st

from cairn.frontend.request_state import PackedLogprobs
from cairn.types.outputs import TokenLogprob

TOKENS = st.integers(0, (1 << 32) - 1)
VALUES = st.floats(allow_nan=False)
ENTRIES = st.builds(TokenLogprob, TOKENS, VALUES, st.lists(st.tuples(TOKENS, VALUES), max_size=4).map(tuple))


@given(st.lists(st.tuples(st.lists(ENTRIES, max_size=5), st.integers(0, 6)), max_size=8))
def test_a_queue_in_order_and_bit_for_bit(rounds: list[tuple[list[TokenLogprob], int]]) -> None:
    """Known failure 43: what waits for a slow reader takes little memory, and is complete."""
    packed, expected = PackedLogprobs(), list[TokenLogprob]()
    for entries, count in rounds:
        packed.extend(entries)
        expected += entries
        assert packed.take(count) == tuple(expected[:count])
        del expected[:count]
        assert len(packed) == len(expected)
        assert packed.nbytes == sum(16 + 12 * len(entry.top) for entry in expected)
