"""A client's constraints on an answer -> a grammar, compiled in a helper process that a bomb may take down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from cairn.system.tenant_cache import TenantCache
from cairn.text.grammar.call_grammar import Offered, callable_tools, lark_of_calls
from cairn.text.grammar.compile_parent import GrammarHelper
from cairn.text.grammar.compile_wire import MEMORY, SECONDS, Compile, GrammarVerdict, Vocab
from cairn.text.grammar.grammar import GrammarError, Shape, Structure, ToolChoice, Wanted
from cairn.text.grammar.vocabulary import TokenTable
from cairn.text.output.call_formats import CallFormat
from cairn.text.output.output_parser import further_markers
from cairn.text.render.fair_semaphore import LongTexts
from cairn.text.tokens.json_texts import length
from cairn.text.tokens.tokenizer import INLINE
from cairn.types.errors import InvalidRequest
from cairn.types.request import Grammar, OutputFormat

KEPT_BYTES = 32 << 20
"""Most bytes of cached verdicts on grammars."""
_KNOWN_BYTES = 512
"""Bytes of a cached verdict beside its texts and those of its job."""


class HeldAnswer(NamedTuple):
    """The constraint on an answer."""

    grammar: Grammar | None = None
    """None if the answer may be anything."""
    warnings: tuple[str, ...] = ()
    """Requested constraints that are not enforced: sentences that name the client's field."""


class Compiler:
    """Compiler of one model's grammars. Every method runs on one event loop."""

    def __init__(self, table: Callable[[Vocab], TokenTable], long: LongTexts) -> None:
        """Take `table`, which reads a vocabulary's tokens in a thread, and the threads for long tool schemas."""
        self._helper = GrammarHelper(table)
        self._long = long
        self._known: TenantCache[tuple[Compile, GrammarVerdict]] = TenantCache(KEPT_BYTES, _known_bytes)

    async def held_to(
        self,
        wanted: Wanted,
        output: OutputFormat,
        tools: Sequence[Mapping[str, Any]] | None,
        form: CallFormat | None,
        share: str,
    ) -> HeldAnswer:
        """Return the constraint on an answer that is parsed by `output`; `form` is the format of tool calls.

        Raises InvalidRequest naming the field if it does not compile within the limits; Overloaded and Unavailable as
        `GrammarHelper.compile`.
        """
        choice, structure = wanted.choice, wanted.structure
        asked = choice.required or choice.names is not None or choice.strict or structure is not None
        if tools and form is not None and asked:
            return await self._calling(form, output, wanted, tools, share)
        if structure is None:
            return HeldAnswer()
        return await self._compiled("", structure, output, structure.field, share)

    async def again(self, text: str, output: OutputFormat, share: str) -> Grammar | None:
        """Rebuild a grammar from its `Grammar.text` after a restart; None for an empty text."""
        if not text:
            return None
        return (await self._tried(Compile(vocab=further_markers(output), text=text), "grammar", share)).grammar

    async def close(self) -> None:
        """Stop the process that compiles."""
        await self._helper.close()

    async def _calling(
        self,
        form: CallFormat,
        output: OutputFormat,
        wanted: Wanted,
        tools: Sequence[Mapping[str, Any]],
        share: str,
    ) -> HeldAnswer:
        """Return the grammar of answers that call tools.

        A schema that cannot be enforced is ignored with a warning, unless its tool is strict.
        """
        choice = wanted.choice
        structure = None if choice.required else wanted.structure
        work = partial(_calls, form, tools, choice, alone=choice.required or structure is not None)
        long = length(tools) > INLINE
        try:
            calls, _, unheld = await self._long.run(share, work, None) if long else work(None)
            made = await self._compiled(calls, structure, output, "tools", share)
            return made._replace(warnings=(*made.warnings, *unheld))
        except (InvalidRequest, GrammarError):
            pass  # at least one tool's schema does not compile: try again with only the strict tools' schemas
        try:
            calls, held, _ = await self._long.run(share, work, choice.strict) if long else work(choice.strict)
        except GrammarError as error:
            raise InvalidRequest(f"tools cannot be followed: {error}", field="tools") from None
        if structure is not None:
            await self._compiled("", structure, output, structure.field, share)  # raises if the structure is at fault
        made = await self._compiled(calls, structure, output, "tools", share)
        unenforced = f"tools: {', '.join(tool.name[:64] for tool in held if tool.name not in choice.strict)}"
        return made._replace(warnings=(*made.warnings, f"{unenforced}: the schema of the arguments is not enforced"))

    async def _compiled(
        self, calls: str, structure: Structure | None, output: OutputFormat, field: str, share: str
    ) -> HeldAnswer:
        lead: Literal["", "may", "open"] = "may" if output.reasoning else ""
        shape = Shape(
            structure=structure,
            calls=calls,
            reasoning="open" if output.reasoning_open else lead,
            thoughts=output.thoughts,
        )
        return await self._tried(Compile(vocab=further_markers(output), shape=shape), field, share)

    async def _tried(self, job: Compile, field: str, share: str) -> HeldAnswer:
        """Return the grammar if it compiles. Raises InvalidRequest naming the field if it does not.

        Verdicts are cached, because tools that do not compile come again with each turn.
        """
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
        made = Grammar(text=verdict.text, bytes=verdict.bytes, growth=verdict.growth)
        return HeldAnswer(made, verdict.warnings)


def _calls(
    form: CallFormat,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    held: Sequence[str] | None,
    *,
    alone: bool,
) -> tuple[str, list[Offered], list[str]]:
    """Return the grammar of calls, its tools, and warnings about parts of their schemas that it does not enforce.

    `alone`: an answer must be calls. Raises as `callable_tools`.
    """
    found = callable_tools(tools, choice.names, held, choice.strict)
    warnings = [one for tool in found for one in tool.warnings]
    return lark_of_calls(form, found, required=alone, parallel=choice.parallel, warnings=warnings), found, warnings


def _known_bytes(known: tuple[Compile, GrammarVerdict]) -> int:
    """Return the bytes of a cached verdict: up to four per character of each text."""
    job, verdict = known
    texts = [job.text, verdict.text, verdict.error, *verdict.warnings]
    if job.shape is not None:
        texts += [job.shape.calls, job.shape.structure.text if job.shape.structure is not None else ""]
    return _KNOWN_BYTES + sum(len(text) if text.isascii() else 4 * len(text) for text in texts)
