"""What a chat template ends the assistant's turns with: the control token behind an answer, where there is one."""

from __future__ import annotations

import json

from cairn.errors import CairnError
from cairn.text.render_wire import Job
from cairn.text.renderer import Renderer
from cairn.text.tokenizer import Tokenizer

_SAID = ("qzjfirst", "qzjsecond", "qzjthird")
"""Words that no template writes."""
_ROLES = ("user", "assistant", "user")


async def turn_ends(renderer: Renderer, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that end an answer in the default template; none where it cannot be told."""
    conversation = [{"role": role, "content": text} for role, text in zip(_ROLES, _SAID, strict=True)]
    payload = json.dumps({"messages": [conversation], "tools": None, "arguments": {}}).encode()
    try:
        (text,) = await renderer.render(Job(template="default", payload=payload, marks=""))
    except CairnError:
        await renderer.settled()
        return frozenset()
    return ends_in(text, tokenizer)


def ends_in(text: str, tokenizer: Tokenizer) -> frozenset[int]:
    """The same, of the conversation `_SAID` as it was rendered.

    What stands behind an answer may also begin the next turn. It does where the whole text begins with it, or where it
    is all that stands there and stood before the first question too.
    """
    before, _, rest = text.partition(_SAID[0])
    _, answered, rest = rest.partition(_SAID[1])
    behind, found, _ = rest.partition(_SAID[2])
    controls = tokenizer.controls.ids
    spans = list(tokenizer.controls.find(behind))
    if not answered or not found or not spans or behind[: spans[0][0]].strip():
        return frozenset()
    end = behind[slice(*spans[0])]
    opening = [before[slice(*span)] for span in tokenizer.controls.find(before)]
    bos = tokenizer.special_tokens.get("bos_token")
    first = next((one for one in opening if one != bos), None)
    begins = end == first or (
        len(spans) == 1 and opening[-1:] == [end] and end != tokenizer.special_tokens.get("eos_token")
    )
    return frozenset() if begins else frozenset((controls[end],))
