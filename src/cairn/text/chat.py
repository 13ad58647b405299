"""Messages -> prompt ids, as the model's chat template says.

messages -> plain dicts (`messages`), control tokens in their texts broken up by a mark (`controls`)
         -> rendered in a process of its own (`renderer`)
         -> ids (`tokenizer`), answers of old put back as they were sampled (`replay`)
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cairn.config import Config
from cairn.errors import InvalidRequest, ModelFileError, Unsupported
from cairn.text.length import check_length
from cairn.text.messages import length, plain_message, texts_in, unused_marks, with_texts
from cairn.text.render_wire import Job, Setup
from cairn.text.renderer import Renderer, launch
from cairn.text.replay import Answer, Prefix, ReplayTable, answer_of, assemble
from cairn.text.sampled import opener, visible_ids
from cairn.text.split import END_THINK, THINK
from cairn.text.templates import load_text
from cairn.text.tokenizer import INLINE, Tokenizer, valid_text
from cairn.text.tools import OPEN as TOOL_CALL
from cairn.text.turn_ends import turn_ends
from cairn.types import OutputFormat

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})
"""Names in a template that are the server's to set, beside those of the special tokens."""

_NAMED = re.compile(r"""\.([^\W\d]\w*)|(['"])([\w-]+)\2""")
"""A field that a template looks up, or a word that it compares with."""
_OPEN_THOUGHT = re.compile(r"<think>\s*\Z")


class Prompt(msgspec.Struct, frozen=True):
    """A chat as the model will see it."""

    tokens: tuple[int, ...]
    output: OutputFormat
    """How the answer is to be read."""


class Sampled(NamedTuple):
    """The ids that were sampled for an answer, and by what they are found again."""

    before: bytes
    """SHA-256 of the ids before it."""
    answer: Answer
    ids: Sequence[int]
    opened: int
    """How many of the ids end the prompt that was answered."""


class _Read(NamedTuple):
    """A chat that was checked: the template's name, messages before and after control tokens in them were broken up."""

    template: str
    clean: list[dict[str, Any]]
    plain: list[dict[str, Any]]
    tools: Any
    arguments: Any
    mark: str
    edge: str


class Chat:
    """One model's chats. Made by `Chat.start`; every method runs on the event loop that started it."""

    def __init__(self, tokenizer: Tokenizer, templates: Mapping[str, str], config: Config) -> None:
        """`templates`: name -> text, none for a model that has no chat template."""
        self.context: int | None = None
        """Tokens that the engine takes, once it has told."""
        self.tokenizer = tokenizer
        self._templates = templates
        self._named = {match[1] or match[3] for text in templates.values() for match in _NAMED.finditer(text)}
        self._thinks = any(tag in text for tag in (THINK, END_THINK) for text in templates.values())
        self._keep_reasoning = config.reasoning_history == "keep"
        self._table = ReplayTable()
        self._renderer: Renderer | None = None
        if templates:
            variables = tokenizer.special_tokens
            self._renderer = Renderer(
                Setup(templates=dict(templates), variables=variables, timeout=config.template_timeout)
            )

    @classmethod
    async def start(cls, folder: Path, config: Config) -> Chat:
        """Read a model's tokenizer and chat templates and start the process that renders them.

        Raises ModelFileError if one of their files is broken. A model without a template starts; `prompt` then refuses.
        """
        process = launch()
        try:
            chat = cls(*await asyncio.to_thread(load_text, folder), config)
        except BaseException:
            process.end()
            raise
        if chat._renderer is None:
            process.end()
            return chat
        try:
            await chat._renderer.start(process)
        except ModelFileError as error:
            raise ModelFileError(f"{folder}: {error}") from error
        chat.tokenizer.end_ids |= await turn_ends(chat._renderer, chat.tokenizer)
        return chat

    async def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tenant: str = "default",
        template_args: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Render and encode a chat up to the beginning of the assistant's next message.

        Messages are OpenAI's: role, content (text or text parts), reasoning_content, tool_calls, tool_call_id, name.
        `template_args` are variables of the template, such as enable_thinking. Raises InvalidRequest or Unsupported
        naming the field, ContextTooLong for a chat far beyond the context, Overloaded if too many wait to be rendered.
        """
        chat = await self._read_apart(messages, tools, template_args)
        found = dict(self._answers(tenant, chat.clean))
        answers = {f"{chat.edge}{n}{chat.edge}": answer for n, answer in found.items()}
        conversations = [chat.plain]
        if found:
            stand_ins = zip(found, answers, strict=True)
            shown = dict(enumerate(chat.plain)) | {n: {"role": "assistant", "content": text} for n, text in stand_ins}
            conversations.append(list(shown.values()))
        try:
            texts = await self._render(chat, conversations)
        except InvalidRequest:
            if not found:
                raise
            texts = await self._render(chat, [chat.plain])  # the template wants the answers as they are
        await self._check_length(texts[0], chat.mark)
        if sum(map(len, texts)) > INLINE:
            tokens = await asyncio.to_thread(self._encode, texts, chat.mark, answers, tenant)
        else:
            tokens = self._encode(texts, chat.mark, answers, tenant)
        return self._prompt(texts[0], tokens, bool(tools))

    async def extend(
        self,
        before: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        template_args: Mapping[str, Any] | None = None,
    ) -> Prompt | None:
        """The prompt for new messages behind `before`, the exact ids of a conversation whose last message is an answer.

        Only what the new messages add is encoded. None where the template does not tell what that is: `prompt` then
        renders and encodes the conversation as a whole. Raises as `prompt` does.
        """
        chat = await self._read_apart([*messages, *new], tools, template_args)
        answer = f"{chat.edge}0{chat.edge}"
        shown = list(chat.plain)
        shown[len(messages) - 1] = {"role": "assistant", "content": answer}
        try:
            (text,) = await self._render(chat, [shown])
        except InvalidRequest:
            return None
        _, found, added = text.partition(answer)
        if not found or answer in added or next(self.tokenizer.controls.find(added), None) is None:
            return None
        await self._check_length(added, chat.mark)
        encode = self.tokenizer.encode_rendered
        long = len(added) > INLINE
        ids = await asyncio.to_thread(encode, added, chat.mark) if long else encode(added, chat.mark)
        return self._prompt(added, [*before, *ids], bool(tools))

    async def _read_apart(self, *chat: Any) -> _Read:
        """`_read`, where it may take long in a thread: of what a template drops there may be megabytes."""
        return await asyncio.to_thread(self._read, *chat) if length(chat) > INLINE else self._read(*chat)

    def _read(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_args: Mapping[str, Any] | None,
    ) -> _Read:
        """Check a chat and make it plain."""
        if self._renderer is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions instead", field="messages")
        if not messages:
            raise InvalidRequest("messages is empty; it must hold at least one message", field="messages")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if tools and TOOL_CALL not in self._templates[name]:
            raise Unsupported("this model's chat template does not know tool calls in <tool_call> tags", field="tools")
        arguments = self._arguments(template_args or {})
        try:
            clean = [plain_message(message, n, thinks=self._thinks) for n, message in enumerate(messages)]
            mark, edge = unused_marks([*texts_in([clean, tools or [], arguments]), *self._templates.values()])
            broken = partial(self._broken, mark=mark)
            plain, offered = with_texts([clean, tools or None], broken)
            given = {valid_text(name): with_texts(value, broken) for name, value in arguments.items()}
        except RecursionError:
            raise InvalidRequest("messages or tools are nested too deeply", field="messages") from None
        return _Read(name, clean, plain, offered, given, mark, edge)

    async def _render(self, chat: _Read, conversations: list[Any]) -> list[str]:
        assert self._renderer is not None
        payload = _json({"messages": conversations, "tools": chat.tools, "arguments": chat.arguments})
        texts = await self._renderer.render(Job(template=chat.template, payload=payload, marks=chat.mark + chat.edge))
        return [self.tokenizer.begun_chat(text) for text in texts]

    async def _check_length(self, rendered: str, mark: str) -> None:
        """What a template put into the prompt: contents, tools, calls, and of reasoning what it keeps."""
        if self.context is not None:
            encode = partial(self.tokenizer.encode_rendered, mark=mark)
            await check_length(encode, [rendered], self.context, "messages")

    def _prompt(self, text: str, tokens: Sequence[int], tools: bool) -> Prompt:
        """`text`: what was rendered, or its end."""
        thought = _OPEN_THOUGHT.search(text, max(len(text) - 64, 0)) is not None
        return Prompt(
            tuple(tokens), OutputFormat(reasoning=self._thinks, reasoning_open=thought and self._thinks, tools=tools)
        )

    def remember(
        self, tenant: str, prompt_tokens: Sequence[int], generated_tokens: Sequence[int], message: Mapping[str, Any]
    ) -> Sampled | None:
        """Keep what was sampled for `message`, as the client saw it, so that it can be put back when it returns.

        Returns what is kept, for `recall` after a restart; None where that cannot be told exactly.
        """
        sampled = self.sampled(prompt_tokens, generated_tokens, message)
        if sampled is not None:
            self.recall(tenant, sampled)
        return sampled

    def recall(self, tenant: str, sampled: Sampled) -> None:
        """Put into the table what `remember` once returned."""
        self._table.put(tenant, sampled.before, sampled.answer, sampled.ids)

    def sampled(
        self, prompt_tokens: Sequence[int], generated_tokens: Sequence[int], message: Mapping[str, Any]
    ) -> Sampled | None:
        """What stands in the context for `message` when the conversation goes on; None if that cannot be told."""
        if self._renderer is None:
            return None
        seen = plain_message(message, 0, thinks=False)
        answer = answer_of(plain_message(message, 0, thinks=self._thinks))
        size = opener(self.tokenizer, prompt_tokens)
        before = list(prompt_tokens[: len(prompt_tokens) - size])
        opened = list(prompt_tokens[len(before) :])
        if answer is None or (not self._keep_reasoning and (opened or answer.reasoning)):
            return None
        thought = bool(opened) and END_THINK.encode() not in b"".join(map(self.tokenizer.token_bytes, opened))
        for tools in (True, False):
            output = OutputFormat(reasoning=self._thinks, reasoning_open=thought, tools=tools)
            ids = visible_ids(self.tokenizer, generated_tokens, seen, output)
            if ids is not None:
                return Sampled(Prefix().digest(before), answer, opened + ids, len(opened))
        return None

    async def close(self) -> None:
        """End the rendering process."""
        if self._renderer is not None:
            await self._renderer.close()

    def _answers(self, tenant: str, messages: list[dict[str, Any]]) -> list[tuple[int, Answer]]:
        """(place, identity) of the assistant messages that may have been sampled here."""
        found = []
        for n, message in enumerate(messages):
            answer = answer_of(message) if message["role"] == "assistant" else None
            if answer is not None and self._table.knows(tenant, answer):
                found.append((n, answer))
        return found

    def _broken(self, text: str, mark: str) -> str:
        """What a template looks up or compares with stays as it is where that is a part of a control token only."""
        return self.tokenizer.controls.break_up(valid_text(text), mark, whole=text not in self._named)

    def _arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        taken = sorted(given.keys() & (RESERVED | self.tokenizer.special_tokens.keys()))
        if taken:
            raise InvalidRequest(f"chat_template_kwargs may not set {taken[0]!r}", field="chat_template_kwargs")
        return dict(given)

    def _encode(self, texts: list[str], mark: str, answers: Mapping[str, Answer], tenant: str) -> list[int]:
        def encode(text: str) -> list[int]:
            return self.tokenizer.encode_rendered(text, mark)

        if len(texts) == 1:
            return encode(texts[0])
        return assemble(
            texts[0],
            texts[1],
            answers,
            encode,
            lambda before, answer: self._table.find(tenant, before, answer),
            lambda text: next(self.tokenizer.controls.find(text), None) is not None,
        )


def _json(value: Any) -> bytes:
    """JSON with integers of any size, which msgpack does not hold."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"messages or tools are not JSON: {error}", field="messages") from error
