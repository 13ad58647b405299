"""The Python API: a model in this process.

    from cairn import LLM

    with LLM("demo") as llm:
        print(llm.chat("What is Cairn?").text)
        for piece in llm.generate("Once upon a time", max_tokens=32, stream=True):
            print(piece.text, end="")

`AsyncLLM` is the same for asyncio. `LLM` runs it on an event loop of its own, in a background thread.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import concurrent.futures.thread  # registers its end before ours, see _close_at_exit
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from cairn.config.config import Config
from cairn.entrypoints.answer import Answer, AsyncStream
from cairn.entrypoints.asked import Conversation, Tool, conversations, offered_tools
from cairn.entrypoints.async_llm import AsyncLLM, Prompt
from cairn.entrypoints.keywords import ModelKeywords, SamplingKeywords, tells_model_options, tells_sampling_options
from cairn.types.errors import Cancelled, Unavailable
from cairn.types.outputs import Delta

if TYPE_CHECKING:
    from cairn.frontend.embeddings import Vector

__all__ = ["LLM", "Answer", "AsyncLLM", "AsyncStream", "Stream"]

T = TypeVar("T")

_CLOSE_SECONDS = 10.0


class Stream:
    """The pieces of one answer as they come: `AsyncStream` without asyncio. Leaving the `with` block cancels it."""

    def __init__(self, llm: LLM, stream: AsyncStream) -> None:
        self._llm = llm  # one that nobody holds is closed
        self._run = llm._loop
        self._stream = stream
        # Threads that share it take turns. The lock may be taken again by its holder: what a signal handler asks in
        # the midst of a call is refused below, and must not wait for it.
        self._turn = threading.RLock()

    @property
    def answer(self) -> Answer:
        """What has come so far; complete once the iteration has ended."""
        return self._stream.answer

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        self._run.check()  # a fork may have the lock as another thread held it
        with self._turn:
            piece = self._run.wait(lambda: _next(self._stream))
        if piece is None:
            raise StopIteration
        return piece

    def close(self) -> None:
        """Cancel the request if it still runs."""
        if not self._run.closed:  # that ended it
            self._run.wait(self._stream.aclose)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@tells_model_options
class LLM:
    """A model in this process. Use it with `with`, or call `close`; at the end of the program it closes itself.

    `model` is a folder, a .gguf file, a hub id that was pulled, or 'demo'; keywords are the options of `Config` that
    matter without a server, or a complete `config`. Ctrl-C while it waits cancels the request and raises
    KeyboardInterrupt.

    Any thread may call it, but the program ends where the main thread does: what others still ask then is refused
    with `Unavailable`, so join them first. It may be used where an event loop runs, as in a notebook: that loop waits
    while a call is answered, and `AsyncLLM` lets it go on. A process that was forked from this one has no part in it:
    there every call is refused.
    """

    def __init__(
        self, model: str | None = None, *, config: Config | None = None, **options: Unpack[ModelKeywords]
    ) -> None:
        self._llm = AsyncLLM(model, config=config, **options)
        self._loop = _Loop()
        self._closer = weakref.finalize(self, _close, self._loop, self._llm)
        self._closer.atexit = False  # too late for it: see _close_at_exit
        _close_at_exit(self)
        try:
            self._loop.wait(self._llm.__aenter__)
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
    def chat(  # type: ignore[overload-overlap]  # an empty list, or a text of texts
        self,
        messages: Conversation,
        tools: Iterable[Tool] | None = None,
        stream: Literal[False] = False,
        *,
        response_format: Any = None,
        tool_choice: Any = None,
        template_args: Mapping[str, Any] | None = None,
        progress_bar: bool | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Answer: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        tools: Iterable[Tool] | None = None,
        stream: Literal[False] = False,
        *,
        response_format: Any = None,
        tool_choice: Any = None,
        template_args: Mapping[str, Any] | None = None,
        progress_bar: bool | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[Answer]: ...
    @overload
    def chat(
        self,
        messages: Conversation,
        tools: Iterable[Tool] | None = None,
        *,
        stream: Literal[True],
        response_format: Any = None,
        tool_choice: Any = None,
        template_args: Mapping[str, Any] | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Stream: ...
    @tells_sampling_options
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        tools: Iterable[Tool] | None = None,
        stream: bool = False,
        *,
        response_format: Any = None,
        tool_choice: Any = None,
        template_args: Mapping[str, Any] | None = None,
        progress_bar: bool | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Answer | list[Answer] | Stream:
        """Answer a conversation, or each of several, which run together.

        `messages`: a text, a list of messages in OpenAI's format, or a list of such conversations.
        `tools`: objects in OpenAI's format, or functions: `answer.tool_calls[0].run()` calls one.
        `stream`: return the pieces as they come, in place of the answer; of one conversation only.
        `response_format`: a class (pydantic, dataclass, list[...]), which `answer.parsed` returns, or OpenAI's object.
        `tool_choice`: "auto", "none", "required", or the tool, as in OpenAI's API.
        `template_args`: variables of the chat template.
        `progress_bar`: show a bar with answers and tokens a second; None: for several, where stderr is a terminal.

        Raises InvalidRequest, ContextTooLong, Overloaded, DeadlineExceeded. The first error of several conversations
        ends all of them.
        """
        # Here, and not on the loop's thread: a generator may call the model.
        read, several = conversations(messages)
        given: Any = read if several else read[0]
        offered = None if tools is None else offered_tools(tools)
        how: dict[str, Any] = {
            "response_format": response_format, "tool_choice": tool_choice, "template_args": template_args, **sampling
        }  # fmt: skip
        if stream:
            return Stream(self, self._loop.wait(lambda: self._llm.chat(given, offered, stream=True, **how)))
        made: Answer | list[Answer] = self._loop.wait(
            lambda: self._llm.chat(given, offered, progress_bar=progress_bar, **how)
        )
        return made

    @overload
    def generate(  # type: ignore[overload-overlap]  # an empty list, or a text of texts
        self,
        prompts: str,
        stream: Literal[False] = False,
        *,
        suffix: str = "",
        parse_special: bool = True,
        response_format: Any = None,
        progress_bar: bool | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Answer: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        stream: Literal[False] = False,
        *,
        suffix: str = "",
        parse_special: bool = True,
        response_format: Any = None,
        progress_bar: bool | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[Answer]: ...
    @overload
    def generate(
        self,
        prompts: str,
        *,
        stream: Literal[True],
        suffix: str = "",
        parse_special: bool = True,
        response_format: Any = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Stream: ...
    @tells_sampling_options
    def generate(
        self,
        prompts: str | Sequence[Prompt],
        stream: bool = False,
        *,
        suffix: str = "",
        parse_special: bool = True,
        response_format: Any = None,
        progress_bar: bool | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Answer | list[Answer] | Stream:
        """Continue a text, or each of several texts or lists of token ids, in order.

        No chat template is applied: control tokens that a text holds are control tokens, unless `parse_special` is
        False. With a `suffix` the model fills in the middle, if it can. Many prompts run together, at most
        `max_running` at a time. The first error ends all of them and is raised. `stream`, `response_format` and
        `progress_bar` are as in `chat`.
        """
        given: Any = prompts
        how: dict[str, Any] = {
            "suffix": suffix, "parse_special": parse_special, "response_format": response_format, **sampling
        }  # fmt: skip
        if stream:
            return Stream(self, self._loop.wait(lambda: self._llm.generate(given, stream=True, **how)))
        made: Answer | list[Answer] = self._loop.wait(
            lambda: self._llm.generate(given, progress_bar=progress_bar, **how)
        )
        return made

    def embed(
        self,
        texts: str | Sequence[Prompt],
        *,
        truncate: bool = False,
        normalize: bool = True,
        dimensions: int | None = None,
        prompt_name: str | None = None,
    ) -> Vector:
        """The embedding of a text, or of each of several; see `AsyncLLM.embed`."""
        return self._loop.wait(
            lambda: self._llm.embed(
                texts, truncate=truncate, normalize=normalize, dimensions=dimensions, prompt_name=prompt_name
            )
        )

    def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        truncate: bool = False,
        raw_scores: bool = False,
        instruction: str | None = None,
    ) -> list[float]:
        """How well each document answers a query; see `AsyncLLM.score`."""
        how = {"truncate": truncate, "raw_scores": raw_scores}
        return self._loop.wait(lambda: self._llm.score(query, documents, **how, instruction=instruction))


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._shut = False
        self._pid = os.getpid()
        # What comes in behind the loop's last turn would never be run, nor its caller told. The lock may be taken
        # again by its holder: a signal handler, or the garbage collector, may close the model in the midst of a call.
        self._door = threading.RLock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="cairn-llm", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        # Here, and not in the thread that closes it: an event loop may run there, as in a notebook.
        try:
            self._loop.run_until_complete(_end_tasks())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    @property
    def here(self) -> bool:
        """Whether this is the loop's own thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    @property
    def closed(self) -> bool:
        """Whether it takes nothing more."""
        return self._shut or self.elsewhere

    @property
    def elsewhere(self) -> bool:
        """Whether this is a fork of its process: that has no such thread, and may have its lock as somebody held it."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Refuse a call where to wait for it, or for a lock in front of it, would be to wait for ever."""
        if self.elsewhere:
            raise Unavailable("the model belongs to the process that loaded it")
        if self.here:
            raise RuntimeError("the model was called from its own thread, which would wait for itself")

    def wait(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that `make` gives there, and wait for it here. An interrupt here cancels it there.

        It is made there, too: an interrupt that came between making it here and handing it over would lose it.
        """
        self.check()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._door:
            if self._shut:
                raise Unavailable("the model was closed")
            self._loop.call_soon_threadsafe(self._start, make, future)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Cancelled("the request was cancelled") from None
        except BaseException:
            future.cancel()
            raise

    def _start(self, make: Callable[[], Coroutine[Any, Any, T]], future: concurrent.futures.Future[T]) -> None:
        if future.cancelled():
            return
        task = self._loop.create_task(make())

        def ended(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                future.cancel()
            if not future.set_running_or_notify_cancel():
                return
            if (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

        def cancelled(future: concurrent.futures.Future[T]) -> None:
            if future.cancelled() and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(task.cancel)

        task.add_done_callback(ended)
        future.add_done_callback(cancelled)

    def close(self) -> None:
        """Stop the loop, which ends its tasks, and wait for the thread."""
        if self.elsewhere:
            return
        with self._door:
            self._shut = True
        with contextlib.suppress(RuntimeError):  # it was closed before
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)


_alive: weakref.WeakSet[LLM] = weakref.WeakSet()


def _close_at_exit(llm: LLM) -> None:
    """Have it closed at the end of the program, while threads can still be used.

    `atexit` is too late: it comes after concurrent.futures has closed its pools, which asyncio needs. Threading's own
    hook is run before that, newest first; where a Python has it no more, `atexit` has to do. The hook comes before
    other threads are joined, and must not do that itself: one that waits for the main thread to end would wait for
    ever.
    """
    if not _alive:
        hook: Callable[..., object] = getattr(threading, "_register_atexit", atexit.register)
        hook(_close_all)
    _alive.add(llm)


def _close_all() -> None:
    for llm in list(_alive):
        llm.close()


def _close(loop: _Loop, llm: AsyncLLM) -> None:
    if loop.elsewhere:
        return
    if loop.here:  # the garbage collector ran there
        threading.Thread(target=_close, args=(loop, llm), name="cairn-llm-close").start()
        return
    try:
        loop.wait(llm.close)
    finally:
        loop.close()


async def _end_tasks() -> None:
    """Cancel all others on this loop: somebody may wait for them in another thread."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _next(stream: AsyncIterator[Delta]) -> Delta | None:
    return await anext(stream, None)
