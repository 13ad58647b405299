"""Choice of a model's call format: the declared one, one from the table, or one derived from its template.

A format is accepted if it reads the calls that the model's own template writes. If none does, the table's is used: a
template may write history in another way than the model answers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from cairn.text.chat.declared_call_format import declared_form
from cairn.text.chat.derived_call_format import derive_form, known_form, reads, sound
from cairn.text.chat.template_traits import OFFERED, Render, Traits
from cairn.text.chat.written_calls import CHECKS, ONE, written_by
from cairn.text.output.call_formats import CallFormat, format_of


async def chosen_form(
    text: str, render: Render, traits: Traits, declared: Any, ends: Collection[str]
) -> CallFormat | None:
    """Return the call format of a template; None if no source has one.

    `text` is the template, `traits` its traits with tools, `declared` the model's response template if it has one,
    `ends` the texts of the tokens that end an answer.
    """
    known = format_of(text)
    given: dict[str, Any] = {} if traits.absent else {"tools": None, "documents": None}
    given["tools"] = [OFFERED]
    said = declared_form(declared, ends)
    if said is not None and not (known is said if said.kind == "channel" else sound(said)):
        said = None
    if not (traits.offers and traits.calls):
        return known if said is None else known_form(said)
    if known is not None and (said is None or known_form(said) is known):
        if known.kind == "channel":
            return known
        written = await written_by(render, traits, given, ends, [ONE])
        if ONE not in written or reads(known, written):
            return known
    written = await written_by(render, traits, given, ends, CHECKS)
    found = derive_form(written)
    if said is not None and (said.kind == "channel" or ONE not in written or reads(said, {ONE: written[ONE]})):
        return known_form(said, *([found] if found is not None else []))
    return known if found is None else known_form(found)
