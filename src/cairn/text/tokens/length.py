"""A length check before a text is encoded as a whole, which takes 150 bytes of memory per byte of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cairn.text.render.fair_semaphore import LongTexts
from cairn.types.errors import ContextTooLong

USUAL_CHARACTERS = 8
"""Characters per token of the context above which a text is measured; natural languages and code have 1 to 5."""
PIECE = 16_384
"""Characters of one piece of a text that is measured."""


Encode = Callable[[str], Sequence[int]]


async def check_length(
    encode: Encode, texts: Sequence[str], context: int, field: str, long: LongTexts, share: str
) -> None:
    """Raise ContextTooLong if the texts together are far longer than `context` tokens.

    They are encoded in pieces until twice the context is exceeded; the cuts add far fewer tokens than that. `share` is
    the tenant whose time is used.
    """
    if sum(map(len, texts)) <= max(PIECE, USUAL_CHARACTERS * context):
        return
    count = await long.run(share, _count, encode, texts, 2 * context)
    if count > 2 * context:
        raise ContextTooLong(
            f"the text has more than {count} tokens (counting stopped there); the context is {context} tokens",
            field=field,
            prompt_tokens=count,
            context=context,
        )


def _count(encode: Encode, texts: Sequence[str], enough: int) -> int:
    """Return roughly how many tokens the texts have, or the first count above `enough`."""
    count = 0
    for text in texts:
        for start in range(0, len(text), PIECE):
            count += len(encode(text[start : start + PIECE]))
            if count > enough:
                return count
    return count
