"""Chat messages -> prompt ids, through the model's chat template.

messages -> plain dicts (`messages`), control tokens in their texts broken up by a mark (`control_tokens`)
         -> adapted to what the template can show (`template_traits`), rendered in a helper process (`render`)
         -> ids (`tokenizer`), earlier answers replaced by the ids that were sampled (`replay`)
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from cairn.config.config import Config
from cairn.system.interfaces import Clock
from cairn.system.posix import SystemClock
from cairn.text.chat.call_ids import with_ids
from cairn.text.chat.choose_call_format import chosen_form
from cairn.text.chat.messages import (
    plain_message,
    unused_marks,
    with_message_texts,
    with_texts,
    with_tools_by_instruction,
)
from cairn.text.chat.replay import (
    AnswerIdentity,
    Prefix,
    ReplayTable,
    answer_of,
    assemble,
    conversation_digests,
    digest_after,
    offered_by,
    opener,
    visible_ids,
)
from cairn.text.chat.template_traits import Traits, find_traits, fitted, in_parts, left_out, standing_in
from cairn.text.chat.templates import (
    ANSWERED,
    defaults,
    given_template,
    load_text,
    response_template,
    turn_ends,
    unusable,
)
from cairn.text.grammar.compiler import Compiler, HeldAnswer
from cairn.text.grammar.grammar import ANYTHING, Structure, Wanted
from cairn.text.grammar.vocabulary import TokenTable, token_table
from cairn.text.output.call_formats import BY_NAME, CallFormat, format_of, name_of
from cairn.text.output.reasoning_formats import HARMONY, thinks, thoughts_of
from cairn.text.output.tool_parser import FUNCTION, offered_tools
from cairn.text.render.fair_semaphore import LongTexts
from cairn.text.render.parent import Renderer, launch
from cairn.text.render.render_wire import Job, Setup
from cairn.text.tokens.json_texts import length, texts_in
from cairn.text.tokens.length import check_length
from cairn.text.tokens.tokenizer import INLINE, Tokenizer, valid_text
from cairn.types.errors import CairnError, ConfigError, InvalidRequest, ModelFileError, Unsupported
from cairn.types.request import Grammar, OfferedTool, OutputFormat

log = logging.getLogger("cairn.text")
T = TypeVar("T")
SEARCHED_INLINE = 1 << 18
"""Most characters of a rendered text that are searched on the event loop, which takes a few milliseconds."""

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})
"""Template variables that only the server sets, beside the special tokens' names."""

_NAMED = re.compile(r"""\.([^\W\d]\w*)|(['"])([\w-]+)\2""")
"""A field that a template looks up, or a string literal that it compares with."""
NO_TEMPLATE = "this model has no chat template"
ELSE = "use /v1/completions, or start the server with --chat-template NAME or FILE"
"""What to do without a chat template, for error messages."""


class Prompt(msgspec.Struct, frozen=True):
    """A chat encoded for the model."""

    tokens: tuple[int, ...]
    output: OutputFormat
    """How to parse the answer."""
    grammar: Grammar | None = None
    """`Request.grammar`: the constraint on the answer."""
    warnings: tuple[str, ...] = ()
    """Requested constraints that are not enforced."""
    conversation_digest: bytes = b""
    """Digest of the messages; empty without a shared store."""


class Sampled(NamedTuple):
    """The ids that were sampled for an answer, and the key of their entry in the replay table."""

    before: bytes
    """SHA-256 of the ids before the answer."""
    answer: AnswerIdentity
    ids: Sequence[int]
    opened: int
    """How many of the ids come from the end of the prompt: the template opened the reasoning there."""
    conversation_digest: bytes = b""
    """Digest of the conversation up to the answer, with it; empty if it is not known."""


FindSampled = Callable[[Sequence[bytes]], Awaitable[Sequence[Sampled]]]
"""Finds what was sampled elsewhere, by the digests of a conversation up to each of its answers, the newest last."""


class _CheckedChat(NamedTuple):
    """A validated chat, ready to be rendered."""

    template: str
    """Name of the template."""
    clean: list[dict[str, Any]]
    """Plain messages as the client sent them."""
    plain: list[dict[str, Any]]
    """The same with control tokens in their texts broken up, as they are rendered."""
    traits: Traits
    offered: tuple[OfferedTool, ...]
    tools: Any
    arguments: Any
    mark: str
    edge: str
    form: CallFormat | None
    """The format of tool calls; None without tools."""


class Chat:
    """One model's chat encoding. Made by `Chat.start`; every method runs on the event loop that started it."""

    def __init__(
        self, tokenizer: Tokenizer, templates: Mapping[str, str], config: Config, clock: Clock | None = None
    ) -> None:
        """Take `templates` (name -> text; empty without a chat template) and the `clock` that dates them."""
        self._clock = clock or SystemClock()
        self.context: int | None = None
        """The engine's context in tokens; None until `set_engine`."""
        self._vocab: int | None = None
        """The model's vocabulary size; None until `set_engine`."""
        self._ends: tuple[int, ...] = ()
        """The engine's end tokens, beside the tokenizer's."""
        self.long = LongTexts()
        self.tokenizer = tokenizer
        self._templates = templates
        self._named = {match[1] or match[3] for text in templates.values() for match in _NAMED.finditer(text)}
        self._forms = {name: format_of(text) for name, text in templates.items()}
        """Template name -> its format of tool calls."""
        self._thought = thoughts_of(templates.values())
        """How the model marks its reasoning."""
        self._thinks = thinks(self._thought, templates.values())
        self._keep_reasoning = config.reasoning_history == "keep"
        self._instructs_tools = config.tool_instructions
        self.replays = ReplayTable()
        """The ids sampled for messages that may come back."""
        self._traits = {name: (Traits(), Traits()) for name in templates}
        """Template name -> its traits (without tools, with tools)."""
        self._refusal = NO_TEMPLATE
        """Why there is no renderer, for error messages."""
        self._grammars = Compiler(self._token_table, self.long)
        self._renderer: Renderer | None = None
        if templates:
            variables = tokenizer.special_tokens
            self._renderer = Renderer(
                Setup(templates=dict(templates), variables=variables, timeout=config.template_timeout)
            )

    @classmethod
    async def start(cls, folder: Path, config: Config, clock: Clock | None = None) -> Chat:
        """Read a model's tokenizer and chat templates and start the process that renders them.

        Raises ModelFileError if one of their files is broken, ConfigError if the option `chat_template` names no usable
        template. A model without a template, or with one that does not compile, starts; `prompt` then refuses.
        """
        given = None if config.chat_template is None else await asyncio.to_thread(given_template, config.chat_template)
        process = launch()
        try:
            tokenizer, templates = await asyncio.to_thread(load_text, folder, config.tokenizer)
            declared = None if given is not None else await asyncio.to_thread(response_template, folder)
            chat = cls(tokenizer, templates if given is None else {"default": given}, config, clock)
        except BaseException:
            process.end()
            raise
        if chat._renderer is None:
            process.end()
            return chat
        try:
            await chat._renderer.start(process)
        except ModelFileError as error:
            await chat._renderer.close()
            chat._renderer = None
            why = unusable(chat._templates, str(error))
            if given is not None:
                raise ConfigError(f"chat_template: {config.chat_template}: {why}", field="chat_template") from None
            chat._refusal = f"this model's chat template cannot be used: {why}"
            log.warning("%s: %s; %s", folder, chat._refusal, ELSE)
            return chat
        try:
            await chat._look_at_templates(declared)
        except BaseException:
            await chat._renderer.close()
            raise
        return chat

    async def _look_at_templates(self, declared: Any) -> None:
        """Probe each template: what it shows of messages, how it ends assistant turns, and how it writes tool calls.

        `declared` is the model's response template.
        """
        assert self._renderer is not None
        renderer = self._renderer

        async def render(name: str, messages: list[dict[str, Any]], given: dict[str, Any]) -> str | None:
            now = self._clock.time_ns() / 1e9
            variables = defaults(self._templates[name], given.get("tools"), now) | given
            payload = _json({"messages": [messages], "variables": variables})
            try:
                return (await renderer.render(Job(template=name, payload=payload, marks="", now=now)))[0]
            except InvalidRequest:
                return None

        for name in self._templates:
            try:
                self._traits[name] = await find_traits(partial(render, name))
            except CairnError as error:  # an overloaded machine: the probes ran out of time
                log.warning("what the chat template shows of messages is not known: %s", error)
        plain = self._traits["default"][0]
        given = {} if plain.absent else {"tools": None, "documents": None}
        try:
            text = await render("default", in_parts(ANSWERED, plain.parts), given)
        except CairnError:
            text = None
        if text is not None and not self._thought.turn:  # with `turn` the same token ends one part of an answer
            self.tokenizer.end_ids |= turn_ends(text, self.tokenizer)
        ends = {text for text, i in self.tokenizer.controls.ids.items() if i in self.tokenizer.end_ids}
        for name, text in self._templates.items():
            try:
                self._forms[name] = await chosen_form(
                    text, partial(render, name), self._traits[name][True], declared, ends
                )
            except (CairnError, RecursionError, ValueError) as error:
                log.warning("how the chat template calls tools is known by its signs alone: %s", error)
        await renderer.settled()

    @property
    def template(self) -> str:
        """Text of the default template; empty without one."""
        return self._templates.get("default", "")

    @property
    def thinks(self) -> bool:
        """Whether the templates mark reasoning."""
        return self._thinks

    @property
    def calls_tools(self) -> bool:
        """Whether a template shows tools and their calls can be parsed."""
        return any(self._teaches(name) for name in self._templates)

    @property
    def instructs_tools(self) -> bool:
        """Whether tools are described in the first message, because no template shows them."""
        return self._instructs_tools and not self.calls_tools

    async def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tenant: str = "default",
        share: str = "",
        template_args: Mapping[str, Any] | None = None,
        wanted: Wanted = ANYTHING,
        find_sampled: FindSampled | None = None,
    ) -> Prompt:
        """Render and encode a chat up to the beginning of the assistant's next message.

        Messages are OpenAI's: role, content (text or text parts), reasoning_content, tool_calls, tool_call_id, name.
        `template_args` are variables of the template, such as enable_thinking; `share` is the tenant whose time is
        used; `wanted` is the constraint on the answer; `find_sampled` finds what other servers sampled. Raises
        InvalidRequest or Unsupported naming the field, ContextTooLong for a chat far beyond the context, Overloaded if
        too many requests of `share` wait to be rendered.
        """
        chat = await self._checked(share, messages, tools, template_args)
        digest = b""
        if find_sampled is not None:
            digest = await self._put_sampled(tenant, share, chat.clean, find_sampled)
        found = dict(self._answers(tenant, chat.clean))
        answers = {f"{chat.edge}{n}{chat.edge}": answer for n, answer in found.items()}
        conversations = [chat.plain]
        if found:
            pairs = zip(found, answers, strict=True)
            shown = dict(enumerate(chat.plain)) | {n: self._stand_in(chat.plain[n], text) for n, text in pairs}
            conversations.append(list(shown.values()))
        try:
            texts = await self._render(chat, conversations, share)
        except InvalidRequest:
            if not found:
                raise
            texts = await self._render(chat, [chat.plain], share)  # the template refuses marks in place of answers
        await self._check_shown(chat, texts[0], share)
        await self._check_length(texts[0], chat.mark, share)
        if sum(map(len, texts)) > INLINE:
            tokens = await self.long.run(share, self._encode, texts, chat.mark, answers, tenant)
        else:
            tokens = self._encode(texts, chat.mark, answers, tenant)
        prompt = msgspec.structs.replace(self._prompt(chat, texts[0], tokens), conversation_digest=digest)
        return await self._with_grammar(chat, prompt, wanted, tools, share)

    async def _put_sampled(
        self, tenant: str, share: str, messages: list[dict[str, Any]], find_sampled: FindSampled
    ) -> bytes:
        """Put what other servers sampled for a chat's answers into the replay table; return the messages' digest."""
        digests = (
            await self.long.run(share, conversation_digests, messages)
            if length(messages) > INLINE
            else conversation_digests(messages)
        )
        answers = [digests[n] for n, message in enumerate(messages) if message["role"] == "assistant"]
        for sampled in await find_sampled(answers) if answers else ():
            self.recall(tenant, sampled)
        return digests[-1]

    async def extend(
        self,
        before: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        share: str = "",
        template_args: Mapping[str, Any] | None = None,
        wanted: Wanted = ANYTHING,
    ) -> Prompt | None:
        """Append new messages to `before`, the exact ids of a conversation whose last message is an answer.

        Only the text of the new messages is encoded. Returns None if that text cannot be told apart in the rendering:
        the caller then encodes the whole conversation with `prompt`. Raises as `prompt` does.
        """
        if self._thought.shut and (not before or before[-1] not in self.tokenizer.control_ids):
            return None  # the answer was cut
        chat = await self._checked(share, [*messages, *new], tools, template_args)
        answer = f"{chat.edge}0{chat.edge}"
        shown = list(chat.plain)
        shown[len(messages) - 1] = self._stand_in(shown[len(messages) - 1], answer)
        try:
            (text,) = await self._render(chat, [shown], share)
        except InvalidRequest:
            return None
        before_it, found, added = text.partition(answer)
        place = self._thought.place(before_it, added)
        if not found or place is None:
            return None
        _, added = place
        if answer in added or next(self.tokenizer.controls.find(added), None) is None:
            return None
        if await self._missing(chat.plain[len(messages) :], added, share):
            return None
        await self._check_length(added, chat.mark, share)
        encode = self.tokenizer.encode_rendered
        long = len(added) > INLINE
        ids = await self.long.run(share, encode, added, chat.mark) if long else encode(added, chat.mark)
        return await self._with_grammar(chat, self._prompt(chat, added, [*before, *ids]), wanted, tools, share)

    async def _with_grammar(
        self, chat: _CheckedChat, prompt: Prompt, wanted: Wanted, tools: Sequence[Mapping[str, Any]] | None, share: str
    ) -> Prompt:
        """Return the prompt with the grammar for the wanted constraints, if there are any."""
        held = await self._grammars.held_to(wanted, prompt.output, tools, chat.form, share)
        output = prompt.output
        if tools and chat.form is not None:
            output = msgspec.structs.replace(output, held=held.grammar is not None, calls_only=wanted.choice.required)
        if wanted.choice.names is not None:
            offered = tuple(tool for tool in output.offered if tool.name in wanted.choice.names)
            output = msgspec.structs.replace(output, offered=offered)
        return msgspec.structs.replace(prompt, grammar=held.grammar, warnings=held.warnings, output=output)

    async def grammar(self, structure: Structure | None, output: OutputFormat, *, share: str = "") -> HeldAnswer:
        """Return the grammar that `structure` puts on an answer parsed by `output`.

        Raises InvalidRequest naming the field if it does not compile within the limits; else as `prompt`.
        """
        return await self._grammars.held_to(Wanted(structure=structure), output, None, None, share)

    async def same_grammar(self, text: str, output: OutputFormat, *, share: str = "") -> Grammar | None:
        """Rebuild a grammar from its `Grammar.text` after a restart; None for an empty text. Raises as `grammar`."""
        return await self._grammars.again(text, output, share)

    async def _checked(self, share: str, *chat: Any) -> _CheckedChat:
        """Check a chat, in a thread if it is long: parts that the template drops may hold megabytes."""
        return await self.long.run(share, self._check, *chat) if length(chat) > INLINE else self._check(*chat)

    def _check(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_args: Mapping[str, Any] | None,
    ) -> _CheckedChat:
        """Validate a chat and convert it to plain messages."""
        if self._renderer is None:
            raise InvalidRequest(f"{self._refusal}; {ELSE}", field="messages")
        if not messages:
            raise InvalidRequest("messages is empty; it must hold at least one message", field="messages")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        traits = self._traits[name][bool(tools)]
        form = self._forms[name] if self._teaches(name) else BY_NAME["hermes"] if self._instructs_tools else None
        if tools and form is None:
            raise Unsupported(
                "this model's chat template does not show tools, or shows calls in a format that is not supported; "
                "leave out --no-tool-instructions to describe tools in the first message",
                field="tools",
            )
        arguments = self._arguments(template_args or {})
        try:
            clean = [plain_message(message, n, thinks=self._thinks) for n, message in enumerate(messages)]
            mark, edge = unused_marks([*texts_in([clean, tools or [], arguments]), *self._templates.values()])
            break_up = partial(self._break_up, mark=mark)
            shown = tools if self._teaches(name) else None
            instructed = clean if not tools or shown else with_tools_by_instruction(clean, tools)
            named = with_ids(instructed, traits.ids)
            plain = [self._with_thinking(with_message_texts(message, break_up)) for message in named]
            offered = with_texts(shown or None, break_up)
            given = {valid_text(name): with_texts(value, break_up) for name, value in arguments.items()}
        except RecursionError:
            raise InvalidRequest("messages or tools are nested too deeply", field="messages") from None
        known = offered_tools(tools or (), xml=form is not None and form.kind == "tagged")
        return _CheckedChat(name, clean, plain, traits, known, offered, given, mark, edge, form if tools else None)

    def _stand_in(self, message: Mapping[str, Any], mark: str) -> dict[str, Any]:
        """Return an assistant message whose content is `mark`.

        A template with turn markers looks back at the calls that results belong to, so there the calls stay and the
        mark is the first call's arguments.
        """
        if not (self._thought.turn and message.get("tool_calls")):
            return {"role": "assistant", "content": mark}
        first, *others = message["tool_calls"]
        first = {**first, "function": {**first["function"], "arguments": mark}}
        return {"role": "assistant", "content": "", "tool_calls": [first, *others]}

    def _with_thinking(self, message: dict[str, Any]) -> dict[str, Any]:
        """Add `thinking`, gpt-oss's name for reasoning; its templates refuse it beside both content and calls."""
        said = message.get("reasoning_content")
        if self._thought is not HARMONY or not said or (message["content"] and message.get("tool_calls")):
            return message
        return {**message, "thinking": said}

    def _teaches(self, name: str) -> bool:
        """Return whether a template shows tools in a call format that `output_parser` reads."""
        return self._traits[name][True].offers and self._forms[name] is not None

    async def _render(self, chat: _CheckedChat, conversations: list[Any], share: str) -> list[str]:
        assert self._renderer is not None
        now = self._clock.time_ns() / 1e9
        nothing = {} if chat.traits.absent else {"tools": None, "documents": None}
        variables = nothing | defaults(self._templates[chat.template], chat.tools, now) | chat.arguments
        variables |= {"tools": chat.tools} if chat.tools else {}
        shown = [fitted(conversation, chat.traits) for conversation in conversations]
        payload = _json({"messages": shown, "variables": variables})
        job = Job(template=chat.template, payload=payload, marks=chat.mark + chat.edge, now=now)
        return [self.tokenizer.with_bos(text) for text in await self._renderer.render(job, share)]

    async def _check_shown(self, chat: _CheckedChat, text: str, share: str) -> None:
        """Raise InvalidRequest if the template drops a message's content or calls. Reasoning may be dropped."""
        lost = await self._missing(chat.plain, text, share)
        if not lost:
            return
        # A template may write a text in another form (escaped, say). Then it shows a stand-in in the text's place.
        shown = list(chat.plain)
        names = {one: f"{chat.edge}{number}{chat.edge}" for number, one in enumerate(lost)}
        for n in {n for n, _ in lost}:
            kinds = [kind for at, kind in lost if at == n]
            shown[n] = standing_in(shown[n], {kind: names[n, kind] for kind in kinds})
        try:
            (text,) = await self._render(chat, [shown], share)
        except InvalidRequest:
            return  # the template inspects the texts, so it does not drop them
        absent = await self._in_thread_if_long(text, share, lambda: [one for one in lost if names[one] not in text])
        for n, kind in absent:
            field = f"messages[{n}].{kind}"
            raise InvalidRequest(f"this model's chat template leaves {field} out of the prompt", field=field)

    async def _missing(self, messages: Sequence[dict[str, Any]], text: str, share: str) -> list[tuple[int, str]]:
        """Return (index, field) of the messages that the template leaves out."""
        return await self._in_thread_if_long(text, share, partial(left_out, messages, text))

    async def _in_thread_if_long(self, text: str, share: str, work: Callable[[], T]) -> T:
        """Run `work`, which searches `text` a few times; in a thread if the text is long."""
        return await self.long.run(share, work) if len(text) > SEARCHED_INLINE else work()

    async def _check_length(self, rendered: str, mark: str, share: str) -> None:
        """Raise ContextTooLong for a rendered text far beyond the context.

        It is measured after rendering, because a template may drop reasoning.
        """
        if self.context is not None:
            encode = partial(self.tokenizer.encode_rendered, mark=mark)
            await check_length(encode, [rendered], self.context, "messages", self.long, share)

    def _prompt(self, chat: _CheckedChat, text: str, tokens: Sequence[int]) -> Prompt:
        """Build the prompt; `text` is the rendered text or its end."""
        end = text[-64:].rstrip()
        thought = end.endswith(self._thought.open)
        return Prompt(
            tuple(tokens),
            OutputFormat(
                reasoning=self._thinks,
                thoughts=self._thought.name,
                reasoning_open=thought and self._thinks,
                reasoning_closed=self._thinks and end.endswith(self._thought.close),
                tools=chat.form is not None,
                xml=chat.form is not None and FUNCTION in self._templates[chat.template],
                calls=_reader_name(chat.form),
                offered=chat.offered,
            ),
        )

    def remember(
        self,
        tenant: str,
        prompt_tokens: Sequence[int],
        generated_tokens: Sequence[int],
        message: Mapping[str, Any],
        conversation_digest: bytes = b"",
    ) -> Sampled | None:
        """Store the ids sampled for `message` (as the client saw it), to be reused when the message comes back.

        `conversation_digest`: that of the prompt, if it is known. Returns the stored entry, for `recall` after a
        restart; None if the ids of the visible text are not certain.
        """
        sampled = self.sampled(prompt_tokens, generated_tokens, message)
        if sampled is not None:
            self.recall(tenant, sampled)
            if conversation_digest:
                after = digest_after(conversation_digest, sampled.answer)
                sampled = sampled._replace(conversation_digest=after)
        return sampled

    def recall(self, tenant: str, sampled: Sampled) -> None:
        """Put an entry that `remember` returned back into the replay table."""
        self.replays.put(tenant, sampled.before, sampled.answer, sampled.ids)

    def sampled(
        self, prompt_tokens: Sequence[int], generated_tokens: Sequence[int], message: Mapping[str, Any]
    ) -> Sampled | None:
        """Return the ids that represent `message` when the conversation goes on; None if they are not certain."""
        ended = bool(generated_tokens) and generated_tokens[-1] in self.tokenizer.end_ids
        if self._renderer is None or (self._thought.turn and not ended):
            return None  # a cut answer lacks the closing tokens of its format
        seen = plain_message(message, 0, thinks=False)
        answer = answer_of(plain_message(message, 0, thinks=self._thinks))
        size = opener(self.tokenizer, prompt_tokens, self._thought)
        before = list(prompt_tokens[: len(prompt_tokens) - size])
        opened = list(prompt_tokens[len(before) :])
        if answer is None or (not self._keep_reasoning and (opened or answer.reasoning)):
            return None
        thought = bool(opened) and self._thought.close.encode() not in b"".join(map(self.tokenizer.token_bytes, opened))
        called = offered_by(seen)
        for tools, one_call, only in (
            (True, False, False),
            (True, False, True),
            (True, True, False),
            (False, False, False),
        ):
            output = OutputFormat(
                reasoning=self._thinks,
                thoughts=self._thought.name,
                reasoning_open=thought,
                tools=tools,
                xml=tools and any(FUNCTION in text for text in self._templates.values()),
                calls=next(filter(None, map(_reader_name, self._forms.values())), "") if tools else "",
                offered=called if tools else (),
                one_call=one_call,
                held=only,
                calls_only=only,
            )
            ids = visible_ids(self.tokenizer, generated_tokens, seen, output)
            if ids is not None:
                return Sampled(Prefix().digest(before), answer, opened + ids, len(opened))
        return None

    def mentions(self, name: str) -> bool:
        """Return whether a template mentions an argument of this name."""
        return any(name in text for text in self._templates.values())

    async def close(self) -> None:
        """Stop the processes that render templates and compile grammars."""
        try:
            await self._grammars.close()
        finally:
            if self._renderer is not None:
                await self._renderer.close()

    def set_engine(self, context: int, vocab: int, ends: Sequence[int]) -> None:
        """Store the engine's context length and vocabulary size in tokens, and its end tokens."""
        self.context, self._vocab, self._ends = context, vocab, tuple(ends)

    def _token_table(self, marks: tuple[str, ...]) -> TokenTable:
        vocab = self.tokenizer.largest_id + 1 if self._vocab is None else self._vocab
        return token_table(self.tokenizer, vocab, self._ends, marks)

    def _answers(self, tenant: str, messages: list[dict[str, Any]]) -> list[tuple[int, AnswerIdentity]]:
        """Return (index, identity) of the assistant messages that may have been sampled here."""
        found = []
        for n, message in enumerate(messages):
            answer = answer_of(message) if message["role"] == "assistant" else None
            if answer is not None and self.replays.knows(tenant, answer):
                found.append((n, answer))
        return found

    def _break_up(self, text: str, mark: str) -> str:
        """Break up control tokens in `text`; words that the template looks up stay whole unless they hold one."""
        return self.tokenizer.controls.break_up(valid_text(text), mark, whole=text not in self._named)

    def _arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        taken = sorted(given.keys() & (RESERVED | self.tokenizer.special_tokens.keys()))
        if taken:
            raise InvalidRequest(f"chat_template_kwargs may not set {taken[0]!r}", field="chat_template_kwargs")
        return dict(given)

    def _encode(self, texts: list[str], mark: str, answers: Mapping[str, AnswerIdentity], tenant: str) -> list[int]:
        def encode(text: str) -> list[int]:
            return self.tokenizer.encode_rendered(text, mark)

        if len(texts) == 1:
            return encode(texts[0])
        return assemble(
            texts[0],
            texts[1],
            answers,
            encode,
            lambda before, answer: self.replays.find(tenant, before, answer),
            lambda text: next(self.tokenizer.controls.find(text), None) is not None,
            self._thought,
        )


def _reader_name(form: CallFormat | None) -> str:
    """Return the name of a format that has a reader of its own, else an empty string."""
    return name_of(form) if form is not None and not form.plain else ""


def _json(value: Any) -> bytes:
    """Encode as JSON: msgpack cannot hold integers of any size. Raise InvalidRequest for what is not JSON."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"messages or tools are not JSON: {error}", field="messages") from error
