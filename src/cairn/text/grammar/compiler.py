"""What is wanted of an answer -> the grammar that it is held to, compiled in a process that a bomb may take down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from cairn.system.tenant_cache import TenantCache
from cairn.text.grammar.compile_parent import GrammarHelper
from cairn.text.grammar.compile_wire import MEMORY, SECONDS, Compile, GrammarVerdict, Vocab
from cairn.text.grammar.grammar import GrammarError, Shape, Structure, Wanted
from cairn.text.grammar.vocabulary import TokenTable
from cairn.text.output.call_formats import CallFormat
from cairn.text.output.call_grammar import callable_tools, lark_of_calls
from cairn.text.output.output_parser import further_markers
from cairn.types.errors import InvalidRequest
from cairn.types.request import Grammar, OutputFormat

KEPT_BYTES = 32 << 20
"""What is kept of grammars that are known to compile, or not to."""
_KNOWN_BYTES = 512
"""What a verdict takes beside its texts, and those of what was asked."""


class Compiler:
    """One model's grammars. Every method runs on one event loop."""

    def __init__(self, table: Callable[[Vocab], TokenTable]) -> None:
        """`table` reads the tokens of a vocabulary, in a thread."""
        self._helper = GrammarHelper(table)
        self._known: TenantCache[tuple[Compile, GrammarVerdict]] = TenantCache(KEPT_BYTES, _known_bytes)

    async def held_to(
        self,
        wanted: Wanted,
        output: OutputFormat,
        tools: Sequence[Mapping[str, Any]] | None,
        form: CallFormat | None,
        share: str,
    ) -> Grammar | None:
        """Return `Request.grammar` of an answer that is read by `output`; None where it may be anything.

        Tools are called in a `form`. Raises InvalidRequest naming the field for what cannot be compiled, or not within
        the limits; Overloaded and Unavailable as `GrammarHelper.compile`.
        """
        choice, structure = wanted.choice, wanted.structure
        asked = choice.required or choice.names is not None or choice.strict or structure is not None
        if tools and form is not None and asked:
            return await self._calling(form, output, wanted, tools, share)
        return None if structure is None else await self._compiled("", structure, output, structure.field, share)

    async def again(self, text: str, output: OutputFormat, share: str) -> Grammar | None:
        """Return the grammar of a text that was `Grammar.text` before a restart; None where that is empty."""
        if not text:
            return None
        return await self._tried(Compile(vocab=further_markers(output), text=text), "grammar", share)

    async def close(self) -> None:
        """End the process that compiles."""
        await self._helper.close()

    async def _calling(
        self,
        form: CallFormat,
        output: OutputFormat,
        wanted: Wanted,
        tools: Sequence[Mapping[str, Any]],
        share: str,
    ) -> Grammar:
        """The grammar of answers that call tools. A schema that cannot be held to is passed over, but of a tool that
        wants it to be."""
        choice = wanted.choice
        structure = None if choice.required else wanted.structure
        alone = choice.required or structure is not None
        try:
            calls = lark_of_calls(
                form, callable_tools(tools, choice.names, None), required=alone, parallel=choice.parallel
            )
            return await self._compiled(calls, structure, output, "tools", share)
        except (InvalidRequest, GrammarError):
            pass  # of one tool at least
        try:
            held = callable_tools(tools, choice.names, choice.strict)
            calls = lark_of_calls(form, held, required=alone, parallel=choice.parallel)
        except GrammarError as error:
            raise InvalidRequest(f"tools cannot be followed: {error}", field="tools") from None
        if structure is not None:
            await self._compiled("", structure, output, structure.field, share)  # it may be what is wrong
        return await self._compiled(calls, structure, output, "tools", share)

    async def _compiled(
        self, calls: str, structure: Structure | None, output: OutputFormat, field: str, share: str
    ) -> Grammar:
        lead: Literal["", "may", "open"] = "may" if output.reasoning else ""
        shape = Shape(
            structure=structure,
            calls=calls,
            reasoning="open" if output.reasoning_open else lead,
            thoughts=output.thoughts,
        )
        return await self._tried(Compile(vocab=further_markers(output), shape=shape), field, share)

    async def _tried(self, job: Compile, field: str, share: str) -> Grammar:
        """Return a grammar that compiles. Raises InvalidRequest naming the field for another: also at once where that
        is known, since tools that cannot be held to come again with each turn."""
        known = self._known.get(share, job)
        verdict = await self._helper.compile(job, field, share) if known is None else known[1]
        if known is None and self._known.make_room(share, _known_bytes((job, verdict))):
            self._known.put(share, job, (job, verdict))
        if verdict.ended == "seconds":
            raise InvalidRequest(f"{field}: compiling it took longer than {SECONDS:g} s of processor time", field=field)
        if verdict.ended == "memory":
            raise InvalidRequest(f"{field}: compiling it took more than {MEMORY >> 20} MiB of memory", field=field)
        if verdict.ended:
            raise InvalidRequest(f"{field} cannot be followed: {verdict.error}", field=field)
        return Grammar(text=verdict.text, bytes=verdict.bytes, growth=verdict.growth)


def _known_bytes(known: tuple[Compile, GrammarVerdict]) -> int:
    """Return what it takes to know a verdict: up to four bytes a character of each text."""
    job, verdict = known
    texts = [job.text, verdict.text, verdict.error]
    if job.shape is not None:
        texts += [job.shape.calls, job.shape.structure.text if job.shape.structure is not None else ""]
    return _KNOWN_BYTES + sum(len(text) if text.isascii() else 4 * len(text) for text in texts)
