"""The Python API: a model in this process, through the same `Service` that the server uses.

    from cairn import LLM

    with LLM("demo") as llm:
        print(llm.chat([{"role": "user", "content": "What is Cairn?"}]).text)
        for piece in llm.generate("Once upon a time", max_tokens=32, stream=True):
            print(piece.text, end="")

`AsyncLLM` is the same for asyncio. `LLM` runs it on an event loop of its own, in a background thread.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import concurrent.futures.thread  # registers its end before ours, see _close_at_exit
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from cairn.answer import Answer, AsyncStream
from cairn.config import Config, closest, local_options, options
from cairn.errors import Cancelled, ConfigError, InvalidRequest, Overloaded, Unavailable
from cairn.resolve import resolve
from cairn.service.requests import SamplingOptions, requests
from cairn.types import Delta, Request

if TYPE_CHECKING:
    from cairn.service.service import Service

__all__ = ["LLM", "Answer", "AsyncLLM", "AsyncStream", "Stream"]

T = TypeVar("T")
Message = Mapping[str, Any]
Prompt = str | Sequence[int]
"""Text, or token ids."""

_CLOSE_SECONDS = 10.0
_IDLE_LOOKS = 20


class AsyncLLM:
    """A model in this process, for asyncio: `async with AsyncLLM("demo") as llm`, or `await AsyncLLM.start("demo")`.

    `model` is a folder, a .gguf file, a hub id that was pulled, or 'demo'; keywords are the options of `Config` that
    matter without a server. Options not given come from CAIRN_* variables and cairn.toml. A complete `config` replaces
    all of that.
    Raises ConfigError or ModelError.
    """

    def __init__(self, model: str | None = None, *, config: Config | None = None, **options: object) -> None:
        self.config = _config(model, options) if config is None else _only(config, model, options)
        self._service: Service | None = None

    @classmethod
    async def start(cls, model: str | None = None, *, config: Config | None = None, **options: object) -> AsyncLLM:
        """A model that is loaded."""
        return await cls(model, config=config, **options).__aenter__()

    async def __aenter__(self) -> AsyncLLM:
        from cairn.service.service import Service

        if self._service is None:
            self._service = await Service.start(self.config, in_process=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def service(self) -> Service:
        """The service behind it. Raises Unavailable before the start and after the end."""
        if self._service is None:
            raise Unavailable("the model is not loaded: it was not started, or it was closed")
        return self._service

    async def close(self) -> None:
        """Cancel what runs and free everything. Does nothing the second time."""
        service, self._service = self._service, None
        if service is not None:
            await service.close()

    async def stream_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        *,
        template_args: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> AsyncStream:
        """The answer to a conversation in OpenAI's message format, piece by piece. See `chat`."""
        service = self.service
        asked = _sampling(sampling)
        objects = _objects("messages", messages)
        prompt = await service.chat.prompt(
            objects,
            _tools(tools) if tools else None,
            template_args=dict(template_args) if template_args else None,
        )
        answered = any(message.get("role") == "assistant" for message in objects)
        request = self._request(prompt.tokens, asked, output=prompt.output, durable=answered)

        def remember(answer: Answer) -> None:
            service.chat.remember("default", prompt.tokens, answer.tokens, answer.message)

        return AsyncStream(service, request, remember)

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        *,
        template_args: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Answer:
        """The answer to a conversation in OpenAI's message format.

        `sampling` are the fields of `SamplingOptions`; what is not given comes from the model's
        generation_config.json. `template_args` are passed to the chat template. Raises InvalidRequest.
        """
        return await (await self.stream_chat(messages, tools, template_args=template_args, **sampling)).wait()

    async def stream_generate(self, prompt: Prompt, **sampling: Any) -> AsyncStream:
        """The continuation of one prompt, piece by piece."""
        asked = _sampling(sampling)
        return AsyncStream(self.service, self._request(await self._tokens(prompt), asked), lambda _: None)

    @overload
    async def generate(self, prompts: str, **sampling: Any) -> Answer: ...
    @overload
    async def generate(self, prompts: Sequence[Prompt], **sampling: Any) -> list[Answer]: ...
    async def generate(self, prompts: str | Sequence[Prompt], **sampling: Any) -> Answer | list[Answer]:
        """The continuation of a text, or of each of several texts or lists of token ids, in order.

        No chat template is applied. Many prompts run together, at most `max_running` at a time. The first error ends
        all of them and is raised.
        """
        if isinstance(prompts, str):
            return await (await self.stream_generate(prompts, **sampling)).wait()
        if not _are_prompts(prompts):
            raise InvalidRequest("prompts is a text, or a list of texts or of lists of token ids", field="prompts")
        places = asyncio.Semaphore(min(self.config.max_running, self.config.max_queue))

        async def one(prompt: Prompt) -> Answer:
            async with places:
                return await self._patiently(prompt, sampling)

        tasks = [asyncio.create_task(one(prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _patiently(self, prompt: Prompt, sampling: Mapping[str, Any]) -> Answer:
        """One of many prompts: where the queue is full, it waits for the others, as long as there are any."""
        idle = 0
        while True:
            try:
                return await (await self.stream_generate(prompt, **sampling)).wait()
            except Overloaded:
                stats = self.service.stats()  # as of the last step, so one look proves nothing
                idle = 0 if stats.running + stats.waiting else idle + 1
                if idle == _IDLE_LOOKS:
                    raise
                await asyncio.sleep(0.05)

    async def _tokens(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        from cairn.text.tokenizer import INLINE

        encode = self.service.tokenizer.encode_prompt
        return encode(prompt) if len(prompt) <= INLINE else await asyncio.to_thread(encode, prompt)

    def _request(self, tokens: Sequence[int], asked: SamplingOptions, **more: Any) -> Request:
        service = self.service
        (request,) = requests(
            service.spec,
            tokens,
            asked,
            ids=service.next_id,
            context=service.info.context,
            max_choices=1,
            timeout=self.config.request_timeout,
            **more,
        )
        return request


class Stream:
    """The pieces of one answer as they come: `AsyncStream` without asyncio. Leaving the `with` block cancels it."""

    def __init__(self, run: _Loop, stream: AsyncStream) -> None:
        self._run = run
        self._stream = stream

    @property
    def answer(self) -> Answer:
        """What has come so far; complete once the iteration has ended."""
        return self._stream.answer

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        piece = self._run.wait(_next(self._stream))
        if piece is None:
            raise StopIteration
        return piece

    def close(self) -> None:
        """Cancel the request if it still runs."""
        self._run.wait(self._stream.aclose())

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LLM:
    """A model in this process. Use it with `with`, or call `close`; at the end of the program it closes itself.

    `model` is a folder, a .gguf file, a hub id that was pulled, or 'demo'; keywords are the options of `Config` that
    matter without a server, or a complete `config`. Any thread may call it. Ctrl-C while it waits cancels the request
    and raises KeyboardInterrupt.
    """

    def __init__(self, model: str | None = None, *, config: Config | None = None, **options: object) -> None:
        self._llm = AsyncLLM(model, config=config, **options)
        self._loop = _Loop()
        self._closer = weakref.finalize(self, _close, self._loop, self._llm)
        self._closer.atexit = False  # too late for it: see _close_at_exit
        _close_at_exit(self)
        try:
            self._loop.wait(self._llm.__aenter__())
        except BaseException:
            self._closer()
            raise

    @property
    def config(self) -> Config:
        """The options it runs with."""
        return self._llm.config

    def close(self) -> None:
        """Cancel what runs and free everything. Does nothing the second time."""
        self._closer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        stream: Literal[False] = False,
        **sampling: Any,
    ) -> Answer: ...
    @overload
    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        *,
        stream: Literal[True],
        **sampling: Any,
    ) -> Stream: ...
    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        stream: bool = False,
        **sampling: Any,
    ) -> Answer | Stream:
        """The answer to a conversation, whole or as a stream of `Delta`s; see `AsyncLLM.chat`."""
        if stream:
            return Stream(self._loop, self._loop.wait(self._llm.stream_chat(messages, tools, **sampling)))
        return self._loop.wait(self._llm.chat(messages, tools, **sampling))

    @overload
    def generate(self, prompts: str, stream: Literal[False] = False, **sampling: Any) -> Answer: ...
    @overload
    def generate(self, prompts: Sequence[Prompt], stream: Literal[False] = False, **sampling: Any) -> list[Answer]: ...
    @overload
    def generate(self, prompts: str, *, stream: Literal[True], **sampling: Any) -> Stream: ...
    def generate(
        self, prompts: str | Sequence[Prompt], stream: bool = False, **sampling: Any
    ) -> Answer | list[Answer] | Stream:
        """The continuation of one text, or of each of several; a stream for one text. See `AsyncLLM.generate`."""
        if not stream:
            return self._loop.wait(self._llm.generate(prompts, **sampling))
        if not isinstance(prompts, str):
            raise InvalidRequest("stream=True takes one prompt, not a list", field="stream")
        return Stream(self._loop, self._loop.wait(self._llm.stream_generate(prompts, **sampling)))


def _are_prompts(given: object) -> bool:
    """Whether it is a sequence of texts and of sequences of token ids."""
    if not isinstance(given, Sequence):
        return False
    return all(
        isinstance(prompt, str) or (isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt))
        for prompt in given
    )


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cairn-llm", daemon=True)
        self._thread.start()

    @property
    def here(self) -> bool:
        """Whether this is the loop's own thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it here. An interrupt here cancels it there."""
        if self._loop.is_closed():
            work.close()
            raise Unavailable("the model was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Cancelled("the request was cancelled") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop and end the thread."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()


_alive: weakref.WeakSet[LLM] = weakref.WeakSet()


def _close_at_exit(llm: LLM) -> None:
    """Have it closed at the end of the program, while threads can still be used.

    `atexit` is too late: it comes after concurrent.futures has closed its pools, which asyncio needs. Threading's own
    hook is run before that, newest first; where a Python has it no more, `atexit` has to do.
    """
    if not _alive:
        hook: Callable[..., object] = getattr(threading, "_register_atexit", atexit.register)
        hook(_close_all)
    _alive.add(llm)


def _close_all() -> None:
    for llm in list(_alive):
        llm.close()


def _close(loop: _Loop, llm: AsyncLLM) -> None:
    if loop.here:  # the garbage collector ran there
        threading.Thread(target=_close, args=(loop, llm), name="cairn-llm-close").start()
        return
    try:
        loop.wait(llm.close())
    finally:
        loop.close()


async def _next(stream: AsyncIterator[Delta]) -> Delta | None:
    return await anext(stream, None)


def _config(model: str | None, given: Mapping[str, object]) -> Config:
    for name in given:
        if name not in local_options() and any(option.name == name for option in options()):
            raise ConfigError(f"{name} is an option of a server; there is none here", field=name)
    return resolve({"model": model, **given}, keywords=True).config


def _only(config: Config, model: str | None, given: Mapping[str, object]) -> Config:
    if model is not None or given:
        raise ConfigError("give either a config or options, not both")
    return config


def _objects(field: str, given: Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(given, str) or not all(isinstance(item, Mapping) for item in given):
        raise InvalidRequest(f"{field} must be a list of objects, as in OpenAI's chat format", field=field)
    return [dict(item) for item in given]


def _tools(given: Sequence[Message]) -> list[dict[str, Any]]:
    found = _objects("tools", given)
    for index, tool in enumerate(found):
        function = tool.get("function")
        named = isinstance(function, Mapping) and isinstance(function.get("name"), str) and function["name"]
        if tool.get("type") != "function" or not named:
            raise InvalidRequest(
                f'tools[{index}] must look like {{"type": "function", "function": {{"name": ...}}}}', field="tools"
            )
    return found


def _sampling(given: Mapping[str, Any]) -> SamplingOptions:
    known = SamplingOptions.__struct_fields__
    for name in given:
        if name not in known:
            raise InvalidRequest(f"unknown option {name!r}{closest(name, known)}", field=name)
    return SamplingOptions(**given)
