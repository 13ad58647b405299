"""What is wanted of an answer -> the grammar that it is held to, compiled in a process that a bomb may take down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cairn.text.grammar.grammar import Grammar, GrammarError, Shape, Structure, Wanted
from cairn.text.output.call_formats import CallFormat
from cairn.text.output.call_grammar import callable_tools, lark_of_calls
from cairn.text.render.parent import Renderer
from cairn.text.render.render_wire import GRAMMAR_SECONDS, Setup
from cairn.types.errors import InvalidRequest
from cairn.types.request import OutputFormat

KEPT = 256
"""Grammars that are known to compile."""


class Compiler:
    """One model's grammars. Every method runs on one event loop."""

    def __init__(self) -> None:
        self.renderer: Renderer | None = None
        """The process to use; None for one of its own, which starts with the first grammar."""
        self._own: Renderer | None = None
        self._known: dict[Shape, Grammar] = {}

    async def held_to(
        self,
        wanted: Wanted,
        output: OutputFormat,
        tools: Sequence[Mapping[str, Any]] | None,
        form: CallFormat | None,
        share: str,
    ) -> Grammar:
        """`Request.grammar` of an answer that is read by `output`; "" where it may be anything.

        Tools are called in a `form`. Raises InvalidRequest naming the field for what cannot be compiled, or not within
        the limits; Overloaded and Unavailable as for any job of the process.
        """
        choice, structure = wanted.choice, wanted.structure
        asked = choice.required or choice.names is not None or choice.strict or structure is not None
        if tools and form is not None and asked:
            return await self._calling(form, output, wanted, tools, share)
        if structure is None:
            return Grammar()
        return await self._compiled("", structure, output, structure.field, share)

    async def close(self) -> None:
        """End the process of its own."""
        if self._own is not None:
            await self._own.close()

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
            held = callable_tools(tools, choice.names, None, choice.strict)
            calls = lark_of_calls(form, held, required=alone, parallel=choice.parallel)
            made = await self._compiled(calls, structure, output, "tools", share)
            return made._replace(warnings=(*made.warnings, *(one for tool in held for one in tool.warnings)))
        except (InvalidRequest, GrammarError):
            pass  # of one tool at least
        try:
            held = callable_tools(tools, choice.names, choice.strict, choice.strict)
            calls = lark_of_calls(form, held, required=alone, parallel=choice.parallel)
        except GrammarError as error:
            raise InvalidRequest(f"tools cannot be followed: {error}", field="tools") from None
        if structure is not None:
            await self._compiled("", structure, output, structure.field, share)  # it may be what is wrong
        made = await self._compiled(calls, structure, output, "tools", share)
        told = f"tools: {', '.join(tool.name[:64] for tool in held if tool.name not in choice.strict)}"
        return made._replace(warnings=(*made.warnings, f"{told}: the arguments are not held to the schema"))

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
        if (known := self._known.get(shape)) is None:
            known = self._known[shape] = await self._process().compile(shape, field, share)
            if len(self._known) > KEPT:
                del self._known[next(iter(self._known))]
        return known

    def _process(self) -> Renderer:
        if self.renderer is not None:
            return self.renderer
        if self._own is None:
            self._own = Renderer(Setup(templates={}, variables={}, timeout=GRAMMAR_SECONDS))
        return self._own
