"""A bound on what a text may cost before it is encoded whole, which takes 150 bytes of memory a byte of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cairn.text.render.fair_time import LongTexts
from cairn.types.errors import ContextTooLong

USUAL_CHARACTERS = 8
"""Characters a token from which a text is looked at more closely; languages and code have 1 to 5."""
PIECE = 16_384
"""Characters in one piece of a text that is only measured."""


Encode = Callable[[str], Sequence[int]]


async def check_length(
    encode: Encode, texts: Sequence[str], context: int, field: str, long: LongTexts, share: str
) -> None:
    """Raise ContextTooLong for texts that are together far too long for a context of so many tokens.

    They are encoded in pieces until twice the context is passed; the cuts add far less than that. `share`: in which
    tenant's time.
    """
    if sum(map(len, texts)) <= max(PIECE, USUAL_CHARACTERS * context):
        return
    count = await long.run(share, _count, encode, texts, 2 * context)
    if count > 2 * context:
        raise ContextTooLong(
            f"the text has more than {count} tokens where it was no longer read; the context is {context} tokens",
            field=field,
            prompt_tokens=count,
            context=context,
        )


def _count(encode: Encode, texts: Sequence[str], enough: int) -> int:
    """About how many tokens the texts have, or the first count beyond `enough`."""
    count = 0
    for text in texts:
        for start in range(0, len(text), PIECE):
            count += len(encode(text[start : start + PIECE]))
            if count > enough:
                return count
    return count
