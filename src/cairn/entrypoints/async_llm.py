"""`AsyncLLM`: a model in this process, for asyncio. It uses the same `Service` as the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, Unpack, overload

from cairn.config.config import Config
from cairn.config.option import local_options, options
from cairn.config.resolve import resolve
from cairn.entrypoints.answer import Answer, AsyncStream
from cairn.entrypoints.inputs import (
    Conversation,
    OfferedTools,
    Tool,
    are_prompts,
    conversations,
    form_of,
    is_list,
    offered_tools,
    template_args_of,
)
from cairn.entrypoints.keywords import (
    ModelKeywords,
    SamplingKeywords,
    document_model_options,
    document_sampling_options,
    unknown_keyword,
)
from cairn.entrypoints.progress import BatchProgress
from cairn.frontend.request_options import RequestParams, SamplingOptions
from cairn.frontend.structured_output import wanted_of
from cairn.text.grammar.grammar import Wanted
from cairn.types.errors import ConfigError, InvalidRequest, Overloaded, Unavailable
from cairn.types.request import OutputFormat, Request

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from cairn.frontend.embeddings import Vector
    from cairn.frontend.service import Service

T = TypeVar("T")

Prompt = str | Sequence[int]
"""Text, or token ids."""

_IDLE_LOOKS = 20
_CLOSED = "the model was closed while it was loading"
_NOT_STARTED = (
    "the model is not loaded: use `async with AsyncLLM(...) as llm:`, or `llm = await AsyncLLM.start(...)` and at the "
    "end `await llm.close()`"
)
_ELSEWHERE = "the model was loaded in another event loop; use and close it only there"


log = logging.getLogger("cairn.llm")


class _Chat(NamedTuple):
    """The arguments that all conversations of one call share."""

    asked: SamplingOptions
    offered: OfferedTools
    shown: list[dict[str, Any]] | None
    template_args: dict[str, Any] | None
    wanted: Wanted
    reader: TypeAdapter[Any] | None


class _Continuation(NamedTuple):
    """The arguments that all prompts of one call share."""

    asked: SamplingOptions
    suffix: str
    parse_special: bool
    wanted: Wanted
    reader: TypeAdapter[Any] | None


@document_model_options
class AsyncLLM:
    """A model in this process, for asyncio: `async with AsyncLLM("demo") as llm`, or `await AsyncLLM.start("demo")`.

    `model` is a folder, a .gguf file, a hub id that was pulled, or 'demo'. Keywords are the options of `Config` that
    apply without a server. Other options come from CAIRN_* variables and cairn.toml. A complete `config` replaces all
    of these. Until it is closed, the model belongs to the event loop that loaded it. Raises ConfigError or ModelError.
    """

    def __init__(
        self, model: str | None = None, *, config: Config | None = None, **options: Unpack[ModelKeywords]
    ) -> None:
        self.config = _config(model, options) if config is None else _only(config, model, options)
        self._service: Service | None = None
        self._turn = asyncio.Lock()
        """Held while the model is started or closed, in the event loop `_loop`."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: tuple[asyncio.Task[Any], int] | None = None
        """The task that starts the model, and its count of cancellations before; None once `close` cancelled it."""
        self._closes = 0

    @classmethod
    async def start(
        cls, model: str | None = None, *, config: Config | None = None, **options: Unpack[ModelKeywords]
    ) -> AsyncLLM:
        """Load a model and return it."""
        return await cls(model, config=config, **options).__aenter__()

    async def __aenter__(self) -> AsyncLLM:
        closes = self._closes
        async with self._my_turn():
            if self._service is None:
                if self._closes != closes:
                    raise Unavailable(_CLOSED)
                self._service = await self._start()
        return self

    @contextlib.asynccontextmanager
    async def _my_turn(self) -> AsyncIterator[None]:
        """Hold the lock of this event loop. Raises Unavailable if the model belongs to another loop.

        An asyncio lock works in one loop only, so each loop gets its own. A model left by a loop that has ended is
        freed first.
        """
        loop, left = asyncio.get_running_loop(), None
        if self._loop is not loop:
            if self._elsewhere():
                raise Unavailable(_ELSEWHERE)
            self._loop, self._turn = loop, asyncio.Lock()
            left, self._service = self._service, None
        async with self._turn:
            if self._loop is not loop:  # another loop took the model while this one waited
                raise Unavailable(_ELSEWHERE)
            if left is not None:
                with contextlib.suppress(RuntimeError):  # its event loop is closed
                    await left.close()
            yield

    def _elsewhere(self) -> bool:
        """Return whether another event loop that has not ended holds, starts or closes the model."""
        if self._loop is None or self._loop is asyncio.get_running_loop() or self._loop.is_closed():
            return False
        return self._service is not None or self._turn.locked()

    async def _start(self) -> Service:
        from cairn.frontend.service import Service

        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()  # not 0 in a task that caught a cancellation and went on
        self._starting = task, before
        try:
            return await Service.start(self.config, in_process=True)
        except asyncio.CancelledError:
            if self._starting is not None or task.uncancel() > before:
                raise
            raise Unavailable(_CLOSED) from None
        finally:
            self._starting = None

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def service(self) -> Service:
        """The service that answers. Raises Unavailable before the start, after `close`, and in another event loop."""
        if self._service is None:
            raise Unavailable("the model was closed" if self._closes else _NOT_STARTED)
        with contextlib.suppress(RuntimeError):  # without an event loop, members that do not wait may be used
            if asyncio.get_running_loop() is not self._loop:
                raise Unavailable(_ELSEWHERE)
        return self._service

    async def close(self) -> None:
        """Cancel all requests and any start in progress, and free the model. A second call does nothing.

        Raises Unavailable in any event loop but the one that loaded the model, unless that loop has ended.
        """
        self._closes += 1
        if self._starting is not None and not self._elsewhere():
            task, before = self._starting
            if task.cancelling() == before:  # otherwise it is cancelled already, and frees what it has loaded
                self._starting = None
                task.cancel()
        async with self._my_turn():
            service, self._service = self._service, None
            if service is not None:
                await service.close()

    @overload
    async def chat(  # type: ignore[overload-overlap]  # an empty list, or a text of texts
        self,
        messages: Conversation,
        tools: Iterable[Tool] | OfferedTools | None = None,
        stream: Literal[False] = False,
        *,
        response_format: Any = None,
        tool_choice: Any = None,
        template_args: Mapping[str, Any] | None = None,
        progress_bar: bool | None = False,
        **sampling: Unpack[SamplingKeywords],
    ) -> Answer: ...
    @overload
    async def chat(
        self,
        messages: Sequence[Conversation],
        tools: Iterable[Tool] | OfferedTools | None = None,
        stream: Literal[False] = False,
        *,
        response_format: Any = None,
        tool_choice: Any = None,
        template_args: Mapping[str, Any] | None = None,
        progress_bar: bool | None = False,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[Answer]: ...
    @overload
    async def chat(
        self,
        messages: Conversation,
        tools: Iterable[Tool] | OfferedTools | None = None,
        *,
        stream: Literal[True],
        response_format: Any = None,
        tool_choice: Any = None,
        template_args: Mapping[str, Any] | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> AsyncStream: ...
    @document_sampling_options
    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        tools: Iterable[Tool] | OfferedTools | None = None,
        stream: bool = False,
        *,
        response_format: Any = None,
        tool_choice: Any = None,
        template_args: Mapping[str, Any] | None = None,
        progress_bar: bool | None = False,
        **sampling: Unpack[SamplingKeywords],
    ) -> Answer | list[Answer] | AsyncStream:
        """Answer a conversation, or each of several, batched together.

        `messages`: a text, a list of messages in OpenAI's format, or a list of such conversations.
        `tools`: objects in OpenAI's format, or functions: `answer.tool_calls[0].run()` calls one.
        `stream`: return an `AsyncStream` of pieces instead of the answer; for one conversation only.
        `response_format`: a class (pydantic, dataclass, list[...]) for `answer.parsed`, or OpenAI's object.
        `tool_choice`: "auto", "none", "required", or the tool, as in OpenAI's API.
        `template_args`: variables of the chat template.
        `progress_bar`: show a progress bar; None shows it if stderr is a terminal.

        Raises InvalidRequest, ContextTooLong, Overloaded, DeadlineExceeded. With several conversations, the first
        error cancels the others.
        """
        self.service.check_generates()
        asked, (form, reader) = _sampling(sampling), form_of(response_format)
        given, several = conversations(messages)
        offered = offered_tools([] if tools is None else tools)
        arguments = template_args_of(template_args)
        wanted = wanted_of(
            {"response_format": form}, offered.names, tool_choice, parallel=asked.parallel_tool_calls is not False
        )
        call = _Chat(
            asked, offered, None if tool_choice == "none" else offered.shown or None, arguments, wanted, reader
        )
        if stream:
            if several:
                raise InvalidRequest("stream=True takes one conversation, not a list of them", field="stream")
            return await self._chat(given[0], call)
        if not several:
            return await (await self._chat(given[0], call)).wait()
        return await self._together([partial(self._chat, one, call) for one in given], progress_bar)

    async def _chat(self, conversation: list[dict[str, Any]], call: _Chat) -> AsyncStream:
        service = self.service
        prompt = await service.chat.prompt(
            conversation, call.shown, template_args=call.template_args, wanted=call.wanted
        )
        _log_warnings(prompt.warnings)
        answered = any(message.get("role") == "assistant" for message in conversation)
        params = RequestParams(output=prompt.output, grammar=prompt.grammar, durable=answered)
        request = self._request(prompt.tokens, call.asked, params)

        def remember(answer: Answer) -> None:
            service.chat.remember("default", prompt.tokens, answer.tokens, answer.message)

        return AsyncStream(service, request, remember, form=call.reader, functions=call.offered.functions)

    @overload
    async def generate(  # type: ignore[overload-overlap]  # an empty list, or a text of texts
        self,
        prompts: str,
        stream: Literal[False] = False,
        *,
        suffix: str = "",
        parse_special: bool = True,
        response_format: Any = None,
        progress_bar: bool | None = False,
        **sampling: Unpack[SamplingKeywords],
    ) -> Answer: ...
    @overload
    async def generate(
        self,
        prompts: Sequence[Prompt],
        stream: Literal[False] = False,
        *,
        suffix: str = "",
        parse_special: bool = True,
        response_format: Any = None,
        progress_bar: bool | None = False,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[Answer]: ...
    @overload
    async def generate(
        self,
        prompts: str,
        *,
        stream: Literal[True],
        suffix: str = "",
        parse_special: bool = True,
        response_format: Any = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> AsyncStream: ...
    @document_sampling_options
    async def generate(
        self,
        prompts: str | Sequence[Prompt],
        stream: bool = False,
        *,
        suffix: str = "",
        parse_special: bool = True,
        response_format: Any = None,
        progress_bar: bool | None = False,
        **sampling: Unpack[SamplingKeywords],
    ) -> Answer | list[Answer] | AsyncStream:
        """Continue a text, or each of several texts or lists of token ids, in order.

        No chat template is applied. Control tokens in a text are control tokens, unless `parse_special` is False. With
        a `suffix`, the model fills in the middle if it can. Prompts are batched, at most `max_running` at a time. The
        first error cancels the others and is raised. `stream`, `response_format` and `progress_bar` are as in `chat`.
        """
        self.service.check_generates()
        asked, (form, reader) = _sampling(sampling), form_of(response_format)
        call = _Continuation(asked, suffix, parse_special, wanted_of({"response_format": form}), reader)
        if isinstance(prompts, str):
            started = await self._continue(prompts, call)
            return started if stream else await started.wait()
        if not are_prompts(prompts):
            raise InvalidRequest("prompts must be a text, or a list of texts or of lists of token ids", field="prompts")
        if stream:
            raise InvalidRequest("stream=True takes one prompt, not a list", field="stream")
        return await self._together([partial(self._continue, prompt, call) for prompt in prompts], progress_bar)

    async def _continue(self, prompt: Prompt, call: _Continuation) -> AsyncStream:
        output = OutputFormat(continues=True)
        tokens = await self._tokens(prompt, call.suffix, call.parse_special)
        held = await self.service.chat.grammar(call.wanted.structure, output)
        _log_warnings(held.warnings)
        request = self._request(tokens, call.asked, RequestParams(output=output, grammar=held.grammar))
        return AsyncStream(self.service, request, lambda _: None, form=call.reader)

    async def _together(
        self, starts: Sequence[Callable[[], Awaitable[AsyncStream]]], progress_bar: bool | None
    ) -> list[Answer]:
        """Return the answers to many prompts in their order; the first error cancels the others."""
        places = asyncio.Semaphore(min(self.config.max_running, self.config.max_queue))

        async def one(start: Callable[[], Awaitable[AsyncStream]]) -> Answer:
            async with places:
                answer = await self._patiently(start, bar)
            bar.answered()
            return answer

        with BatchProgress(len(starts), progress_bar) as bar:
            tasks = [asyncio.create_task(one(start)) for start in starts]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def embed(
        self,
        texts: str | Sequence[Prompt],
        *,
        truncate: bool = False,
        normalize: bool = True,
        dimensions: int | None = None,
        prompt_name: str | None = None,
    ) -> Vector:
        """Return the embedding of a text, float32 [width], or of n texts or lists of token ids, [n, width].

        `truncate`: cut texts that are longer than the model takes. `normalize`: scale vectors to length 1.
        `dimensions`: keep only the first numbers of each vector, and normalise again. `prompt_name`: the model's
        prompt to put before each text, such as "query". Raises InvalidRequest, ContextTooLong.
        """
        import numpy as np

        from cairn.frontend.embeddings import check_dimensions, finished, vectors

        service = self.service
        if not (isinstance(texts, str) or are_prompts(texts)):
            raise InvalidRequest("texts must be a text, or a list of texts or of lists of token ids", field="texts")
        check_dimensions(service, dimensions, normalize=normalize)
        given = [texts] if isinstance(texts, str) else list(texts)
        made, _ = await self._embedding(vectors, given, truncate, "texts", prompt_name)
        stacked: Vector = np.stack(finished(made, dimensions, normalize=normalize))
        return stacked[0] if isinstance(texts, str) else stacked

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        truncate: bool = False,
        raw_scores: bool = False,
        instruction: str | None = None,
    ) -> list[float]:
        """Return how well each document answers the query.

        A reranking model gives a score from 0 to 1, an embedding model the cosine of the two vectors. `raw_scores`:
        return a reranker's numbers before the logistic function. `instruction`: the task for rerankers that take one,
        such as Qwen3-Reranker. Raises InvalidRequest, ContextTooLong.
        """
        from cairn.frontend.embeddings import scores

        listed = isinstance(documents, Sequence) and not isinstance(documents, str)
        if not listed or not isinstance(query, str) or not all(isinstance(one, str) and one for one in documents):
            raise InvalidRequest("score needs a text and a list of texts that are not empty", field="documents")
        pairs = [(query, document) for document in documents]
        compute = partial(scores, raw=raw_scores)
        found, _ = await self._embedding(compute, pairs, truncate, "documents", instruction=instruction)
        return found

    async def _embedding(
        self,
        compute: Callable[..., Awaitable[T]],
        given: Sequence[Any],
        truncate: bool,
        field: str,
        prompt_name: str | None = None,
        instruction: str | None = None,
    ) -> T:
        from cairn.frontend.embeddings import AT_ONCE, EmbeddingCall

        config = self.config
        at_once = max(1, min(AT_ONCE, config.max_queue // 2))
        asking = EmbeddingCall(
            timeout=config.request_timeout,
            at_once=at_once,
            truncate=truncate,
            field=field,
            prompt_name=prompt_name,
            instruction=instruction,
        )
        return await compute(self.service, given, asking)

    async def _patiently(self, start: Callable[[], Awaitable[AsyncStream]], bar: BatchProgress) -> Answer:
        """Return one of many answers; while the queue is full, wait for the other requests to finish."""
        idle = 0
        while True:
            try:
                return await (await start()).wait(lambda piece: bar.tokens(len(piece.tokens)))
            except Overloaded:
                stats = self.service.stats()  # from the last step, so a single idle reading proves nothing
                idle = 0 if stats.running + stats.waiting else idle + 1
                if idle == _IDLE_LOOKS:
                    raise
                await asyncio.sleep(0.05)

    async def _tokens(self, prompt: Prompt, suffix: str, special: bool) -> Sequence[int]:
        if not isinstance(suffix, str):
            raise InvalidRequest("suffix must be a text", field="suffix")
        if not isinstance(special, bool):
            raise InvalidRequest("parse_special must be true or false", field="parse_special")
        from cairn.text.tokens.tokenizer import INLINE

        tokenizer = self.service.tokenizer
        if suffix and tokenizer.middle is None:
            raise InvalidRequest("suffix: this model has no tokens for filling in the middle", field="suffix")
        if not isinstance(prompt, str):
            if not is_list(prompt):
                raise InvalidRequest("the prompt must be a text or a list of token ids", field="prompt")
            if not suffix:
                return prompt
        encode = partial(tokenizer.encode_raw, prompt, suffix, special=special)
        return encode() if len(prompt) + len(suffix) <= INLINE else await asyncio.to_thread(encode)

    def _request(self, tokens: Sequence[int], asked: SamplingOptions, params: RequestParams) -> Request:
        (request,) = self.service.make_requests(tokens, asked, params)
        return request


def _config(model: str | None, keywords: Mapping[str, object]) -> Config:
    for name in keywords:
        if name not in local_options() and any(option.name == name for option in options()):
            raise ConfigError(f"{name} is an option of a server; there is none here", field=name)
    return resolve({"model": model, **keywords}, keywords=True).config


def _only(config: Config, model: str | None, keywords: Mapping[str, object]) -> Config:
    if model is not None or keywords:
        raise ConfigError("give either a config or options, not both")
    return config


def _log_warnings(warnings: Sequence[str]) -> None:
    """Log the requirements on the answer that are not enforced."""
    for warning in warnings:
        log.warning("%s", warning)


def _sampling(keywords: Mapping[str, Any]) -> SamplingOptions:
    for name in keywords:
        if name not in SamplingOptions.__struct_fields__:
            raise InvalidRequest(unknown_keyword(name), field=name)
    return SamplingOptions(**keywords)
