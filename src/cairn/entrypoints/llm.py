"""`LLM`: a model in this process, for scripts and notebooks.

    from cairn import LLM

    with LLM("demo") as llm:
        print(llm.chat("What is Cairn?").text)
        for piece in llm.generate("Once upon a time", max_tokens=32, stream=True):
            print(piece.text, end="")

`LLM` runs an `AsyncLLM` on its own event loop, in a background thread.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import concurrent.futures.thread  # registers its exit hook before ours, see _close_at_exit
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from cairn.config.config import Config
from cairn.entrypoints.answer import Answer, AsyncStream
from cairn.entrypoints.async_llm import AsyncLLM, Prompt
from cairn.entrypoints.inputs import Conversation, Tool, conversations, offered_tools
from cairn.entrypoints.keywords import (
    ModelKeywords,
    SamplingKeywords,
    document_model_options,
    document_sampling_options,
)
from cairn.types.errors import Cancelled, Unavailable
from cairn.types.outputs import Delta

if TYPE_CHECKING:
    from cairn.frontend.embeddings import Vector

__all__ = ["LLM", "Answer", "AsyncLLM", "AsyncStream", "Stream"]

T = TypeVar("T")

_CLOSE_SECONDS = 10.0


class Stream:
    """A stream of one answer's pieces: `AsyncStream` without asyncio. Leaving the `with` block cancels the request."""

    def __init__(self, llm: LLM, stream: AsyncStream) -> None:
        self._llm = llm  # keeps the model alive: one without references is closed
        self._run = llm._loop
        self._stream = stream
        # Threads that share the stream take turns. The lock is reentrant: a signal handler that reads the stream
        # during a call must not wait for the lock; `wait` refuses it.
        self._turn = threading.RLock()

    @property
    def answer(self) -> Answer:
        """The answer so far; complete once the iteration has ended."""
        return self._stream.answer

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        self._run.check()  # in a forked process another thread's hold on the lock never ends
        with self._turn:
            piece = self._run.wait(lambda: _next(self._stream))
        if piece is None:
            raise StopIteration
        return piece

    def close(self) -> None:
        """Cancel the request if it still runs."""
        if not self._run.closed:  # closing the model cancelled the request
            self._run.wait(self._stream.aclose)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@document_model_options
class LLM:
    """A model in this process. Use it with `with`, or call `close`; it also closes itself when the program ends.

    `model` is a folder, a .gguf file, a hub id that was pulled, or 'demo'. Keywords are the options of `Config` that
    apply without a server; or pass a complete `config`. Ctrl-C during a call cancels the request and raises
    KeyboardInterrupt.

    Any thread may call it. The program ends with its main thread: calls of other threads then raise `Unavailable`, so
    join them first. It works where an event loop runs, as in a notebook, but blocks that loop during a call;
    `AsyncLLM` does not. In a process forked from this one every call raises `Unavailable`.
    """

    def __init__(
        self, model: str | None = None, *, config: Config | None = None, **options: Unpack[ModelKeywords]
    ) -> None:
        self._llm = AsyncLLM(model, config=config, **options)
        self._loop = _Loop()
        self._closer = weakref.finalize(self, _close, self._loop, self._llm)
        self._closer.atexit = False  # atexit is too late: see _close_at_exit
        _close_at_exit(self)
        try:
            self._loop.wait(self._llm.__aenter__)
        except BaseException:
            self._closer()
            raise

    @property
    def config(self) -> Config:
        """The options that the model runs with."""
        return self._llm.config

    def __repr__(self) -> str:
        return f"LLM({self.config.model!r}{', closed' if self._loop.closed else ''})"

    def close(self) -> None:
        """Cancel all requests and free the model. A second call does nothing."""
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
    @document_sampling_options
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
        """Answer a conversation, or each of several, batched together.

        `messages`: a text, a list of messages in OpenAI's format, or a list of such conversations.
        `tools`: objects in OpenAI's format, or functions: `answer.tool_calls[0].run()` calls one.
        `stream`: return a `Stream` of pieces instead of the answer; for one conversation only.
        `response_format`: a class (pydantic, dataclass, list[...]) for `answer.parsed`, or OpenAI's object.
        `tool_choice`: "auto", "none", "required", or the tool, as in OpenAI's API.
        `template_args`: variables of the chat template.
        `progress_bar`: show answers and tokens per second; None shows it for several if stderr is a terminal.

        Raises InvalidRequest, ContextTooLong, Overloaded, DeadlineExceeded. With several conversations, the first
        error cancels the others.
        """
        # Read here, not on the loop's thread: a generator may itself call the model.
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
    @document_sampling_options
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

        No chat template is applied. Control tokens in a text are control tokens, unless `parse_special` is False. With
        a `suffix`, the model fills in the middle if it can. Prompts are batched, at most `max_running` at a time. The
        first error cancels the others and is raised. `stream`, `response_format` and `progress_bar` are as in `chat`.
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
        """Return the embedding of a text, or of each of several; see `AsyncLLM.embed`."""
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
        """Return how well each document answers the query; see `AsyncLLM.score`."""
        how = {"truncate": truncate, "raw_scores": raw_scores}
        return self._loop.wait(lambda: self._llm.score(query, documents, **how, instruction=instruction))


class _Loop:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self._shut = False
        self._pid = os.getpid()
        # A call added after the loop's last turn would never run, and its caller would wait for ever. The lock is
        # reentrant: a signal handler or the garbage collector may close the model in the middle of a call.
        self._call_lock = threading.RLock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="cairn-llm", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        # Done in this thread: in the one that closes the model an event loop may be running, as in a notebook.
        try:
            self._loop.run_until_complete(_end_tasks())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    @property
    def here(self) -> bool:
        """Whether the caller is the loop's own thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    @property
    def closed(self) -> bool:
        """Whether new calls are refused."""
        return self._shut or self.elsewhere

    @property
    def elsewhere(self) -> bool:
        """Whether this is a forked process: the loop's thread does not exist there, and the lock may stay held."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise Unavailable or RuntimeError where waiting for a call, or for a lock before it, would never end."""
        if self.elsewhere:
            raise Unavailable("the model belongs to the process that loaded it")
        if self.here:
            raise RuntimeError("the model was called from its own thread, which would wait for itself")

    def wait(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that `make` returns on the loop and return its result; an interrupt here cancels it.

        The coroutine is created on the loop too: an interrupt between creating it here and passing it on would leak it.
        """
        self.check()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._call_lock:
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
        with self._call_lock:
            self._shut = True
        with contextlib.suppress(RuntimeError):  # the loop was closed before
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)


_alive: weakref.WeakSet[LLM] = weakref.WeakSet()


def _close_at_exit(llm: LLM) -> None:
    """Close the model when the program ends, while threads can still be used.

    `atexit` is too late: it runs after concurrent.futures has closed the pools that asyncio needs. Threading's private
    hook runs before that, newest first; a Python without it falls back to `atexit`. The hook runs before other threads
    are joined and must not join them: a thread that waits for the main thread to end would never finish.
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
    """Cancel all other tasks of this loop: other threads may be waiting for them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _next(stream: AsyncIterator[Delta]) -> Delta | None:
    return await anext(stream, None)
