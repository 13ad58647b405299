"""A service that answers as a test scripts it: for wire shapes and failures that the real one rarely produces."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

from cairn.config.config import Config
from cairn.frontend.service import Service
from cairn.models.families.end_tokens import Middle
from cairn.system.metrics import Metrics
from cairn.text.chat.prompt import Prompt
from cairn.text.grammar.compiler import HeldAnswer
from cairn.text.render.fair_semaphore import LongTexts
from cairn.types.errors import CairnError, Cancelled
from cairn.types.model_spec import CacheGroup, ModelSpec
from cairn.types.outputs import Delta, Done, Event, FinishReason, Usage
from cairn.types.request import OutputFormat, Request
from cairn.types.stats import CacheReport, KvStats

SPEC = ModelSpec(
    name="scripted",
    architecture="qwen3",
    layers=1,
    hidden=8,
    heads=1,
    kv_heads=1,
    head_dim=8,
    ffn=8,
    vocab=300,
    context=128,
    norm_eps=1e-6,
    rope_theta=1e4,
    groups=(CacheGroup(kind="full", layers=(0,)),),
    eos_ids=(256,),
    defaults={"temperature": 0.7},
    identity=b"\x01\x02\x03\x04\x05\x06\x07\x08",
)


class Heard:
    """Stand in for a call that collects warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def header(self, name: bytes) -> None:
        return None

    def warn(self, sentence: str) -> None:
        self.warnings.append(sentence)


class Bytes:
    """A tokenizer in which token n is byte n; ids of 256 and more are control tokens."""

    special_tokens: ClassVar[dict[str, str]] = {"bos_token": "<257>"}
    middle: Middle | None = None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        pieces = re.split(r"(<2[5-9]\d>)", text) if special else [text]
        return [
            i for number, piece in enumerate(pieces) for i in ([int(piece[1:-1])] if number % 2 else piece.encode())
        ]

    def encode_prompt(self, text: str, *, special: bool = True) -> list[int]:
        return self.encode(text, special=special)

    def encode_raw(self, prompt: str | Sequence[int], suffix: str, *, special: bool = True) -> list[int]:
        before = self.encode(prompt, special=special) if isinstance(prompt, str) else list(prompt)
        if not suffix:
            return before
        assert self.middle is not None
        after = self.encode(suffix, special=special)
        return [self.middle.prefix, *before, self.middle.suffix, *after, self.middle.middle]

    def spell(self, ids: Sequence[int]) -> str:
        return self.decode(ids, skip_special=False)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        parts = [bytes([id]) if id < 256 else (b"" if skip_special else b"<%d>" % id) for id in ids]
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else b"<%d>" % id

    def detokenizer(self, *, after: Sequence[int] = ()) -> Any:
        return SimpleNamespace(push=lambda ids: self.decode(ids))


def done(reason: FinishReason = FinishReason.STOP, prompt: int = 3, completion: int = 2, cached: int = 0) -> Done:
    usage = Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        accepted_prediction_tokens=1,
        rejected_prediction_tokens=2,
    )
    return Done(reason=reason, usage=usage, cache=CacheReport(computed=prompt - cached, pool=cached))


Step = Event | CairnError | float | list[Event]
"""An event, several at once, an error to raise, or seconds to wait."""


@dataclass
class ScriptedStream:
    request: Request
    steps: list[Step]
    waker: Any = None
    cache: CacheReport | None = None
    over: bool = False
    closed: bool = False
    _queue: list[Event | CairnError] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    @property
    def tokens(self) -> list[int]:
        steps = [event for step in self.steps for event in (step if isinstance(step, list) else [step])]
        return [token for event in steps if isinstance(event, Delta) for token in event.tokens]

    def wake_with(self, waker: Any) -> None:
        self.waker = waker
        self._task = asyncio.ensure_future(self._play())

    async def _play(self) -> None:
        for step in self.steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
                continue
            self._queue += step if isinstance(step, list) else [step]
            self.waker.wake()
            await asyncio.sleep(0)

    def push(self, event: Event | CairnError) -> None:
        self._queue.append(event)
        self.waker.wake()

    def take(self) -> list[Event]:
        results: list[Event] = []
        while self._queue:
            head = self._queue[0]
            if isinstance(head, CairnError):
                if results:
                    break
                self.over = True
                raise head
            results.append(head)
            self._queue.pop(0)
            if isinstance(head, Done):
                self.over = True
        return results

    def close(self) -> None:
        self.closed = self.over = True
        if self._task is not None:
            self._task.cancel()


class ScriptedService:
    """A service whose answers come from `script(request) -> steps`."""

    def __init__(
        self,
        script: Callable[[Request], list[Step]] | None = None,
        *,
        name: str = "scripted",
        config: Config | None = None,
    ) -> None:
        self.script = script or (lambda request: [Delta(text="hi", tokens=(104, 105)), done()])
        self.name = name
        self.names = frozenset({name})
        self.strict = False
        self.attached = ()
        self.leaving = ""
        self.spec = SPEC
        identity = b"\x11\x12\x13\x14\x15\x16\x17"
        self.info = SimpleNamespace(
            context=SPEC.context,
            vocab=SPEC.vocab,
            max_rows=4096,
            identity=identity,
            device="cpu",
            device_text="the CPU: kernels",
            cpu_experts="",
        )
        self.tokenizer = Bytes()
        self.controls: dict[str, int] = {}
        self.chat = self
        self.long = LongTexts()
        self.metrics = Metrics("cairn", "scripted")
        self.streams: list[ScriptedStream] = []
        self.remembered: list[tuple[Any, ...]] = []
        self.prompts: list[tuple[Any, ...]] = []
        self.wanted: list[Any] = []
        self.failing: list[str] = []
        self.reasons: list[str] = []
        self.output = OutputFormat()
        self.template = "enable_thinking"
        self.thinks = self.calls_tools = True
        self.instructs_tools = False
        self._config = config or Config()
        self._ids = itertools.count(1)

    make_requests = Service.make_requests

    def queue_seconds(self) -> float:
        return 0.5

    def kv(self) -> KvStats:
        return self.metrics.kv

    def next_id(self) -> int:
        return next(self._ids)

    async def prompt(
        self,
        messages: Any,
        tools: Any,
        *,
        tenant: str,
        share: str = "",
        template_args: Any = None,
        wanted: Any = None,
        find_sampled: Any = None,
    ) -> Any:
        self.prompts.append((messages, tools, tenant, template_args))
        self.wanted.append(wanted)
        text = "".join(str(message["content"] or "") for message in messages)
        return Prompt(tokens=tuple(text.encode()) or (1,), output=self.output)

    async def grammar(self, structure: Any, output: Any, *, share: str = "") -> HeldAnswer:
        return HeldAnswer()

    def mentions(self, name: str) -> bool:
        return name in self.template

    def remember(self, tenant: str, prompt: Sequence[int], generated: Sequence[int], message: Any, *_: Any) -> None:
        self.remembered.append((tenant, tuple(prompt), tuple(generated), message))

    def check_generates(self) -> None:
        """Accept every request: this model generates text."""

    def generate(self, request: Request, told: Any = None) -> ScriptedStream:
        stream = ScriptedStream(request, self.script(request))
        self.streams.append(stream)
        return stream

    def abort(self, id: int) -> bool:
        for stream in self.streams:
            if stream.request.id == id and not stream.over:
                stream.push(Cancelled("the request was cancelled"))
                return True
        return False

    def status(self, id: int) -> Any:
        for stream in self.streams:
            if stream.request.id == id:
                return SimpleNamespace(
                    id=id,
                    state="finished" if stream.over else "running",
                    prompt_tokens=len(stream.request.prompt),
                    completion_tokens=2,
                    text="hi",
                    reasoning="",
                    reason=None,
                    error="",
                    salt=stream.request.salt,
                    choice=stream.request.choice,
                )
        return None

    def stats(self) -> Any:
        return SimpleNamespace(running=sum(not stream.over for stream in self.streams), waiting=0)

    def unready(self) -> list[str]:
        return self.reasons

    stalled = ""

    def troubles(self) -> list[str]:
        return self.failing
