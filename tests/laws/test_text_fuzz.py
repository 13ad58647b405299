from __future__ import annotations

from collections.abc import Callable

from tests.laws import text_fuzz
from tests.laws.simulator import Broken


def test_every_answer_is_read_right_however_it_is_cut(prove: bool, figure: Callable[[str, str], None]) -> None:
    """Known failures 15, 19, 22, 24."""
    count = 10_000 if prove else 250
    tokens = 0
    for seed in range(count):
        try:
            tokens += text_fuzz.answer(seed)
        except Broken as error:
            raise Broken(f"seed {seed}: {error}") from error
    figure("text fuzz, answers", f"{count:,} answers right ({tokens:,} tokens, each cut three ways)")
    assert tokens > 20 * count


async def test_chats_go_on_with_the_very_ids(prove: bool, figure: Callable[[str, str], None]) -> None:
    """Known failures 9, 22, 23, 24."""
    count = 3_000 if prove else 80
    chats = await text_fuzz.Chats.start()
    exact = 0
    try:
        for seed in range(count):
            try:
                exact += await chats.run(seed)
            except Broken as error:
                raise Broken(f"seed {seed}: {error}") from error
    finally:
        await chats.chat.close()
    figure("text fuzz, chats", f"{count:,} chats right ({exact:,} turns continued exactly)")
    assert exact > count
