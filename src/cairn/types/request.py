"""A request as the front gives it to a worker, and how the front reads the text of its answer."""

from __future__ import annotations

from typing import Literal

import msgspec

from cairn.types.sampling_params import SamplingParams


class OfferedTool(msgspec.Struct, frozen=True):
    """What reading a call needs to know of a tool that may be called."""

    name: str
    values: tuple[str, ...] = ()
    """Parameters whose schema wants something else than a text: a call in XML tags writes them as JSON."""
    shape: str = ""
    """Its schema without what only describes (`text.argument_fit`), as JSON; "" where any arguments fit."""


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the front reads the model's text. All off: the text is passed on as it is."""

    reasoning: bool = False
    """Text between `<think>` and `</think>` is reasoning, not content."""
    thoughts: str = ""
    """So is text in a further form, by its name in `text.thoughts`."""
    reasoning_open: bool = False
    """The prompt already ends inside `<think>`."""
    tools: bool = False
    """`<tool_call>` JSON becomes tool calls."""
    one_call: bool = False
    """The answer ends with its first tool call."""
    xml: bool = False
    """So do `<function=...>` tags in it."""
    calls: str = ""
    """So do calls in a further form, as `text.call_formats` names it."""
    offered: tuple[OfferedTool, ...] = ()
    """The tools there are: an answer that is nothing but the JSON object of a call to one of them is that call."""
    held: bool = False
    """Calls are held to a grammar, so they are read as their form has them. Else those are read too whose marks or
    closing tags are missing, and those in reasoning that nothing follows."""
    calls_only: bool = False
    """The answer is held to calls and nothing else: what is left over of them is no content, and a call that comes a
    second time ends the answer."""
    continues: bool = False
    """The answer goes on the prompt's own text: it is no text of its own, whose first space a decoder may drop."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer is held to, as it was tried in a process of its own."""

    text: str
    """As llguidance reads it; reasoning is included. It is about the text as `OutputFormat` reads it: control tokens
    that are no text are never part of it."""
    bytes: int = 0
    """What it holds when it is compiled."""
    growth: int = 0
    """Bytes more that it holds after each token of an answer, on the average."""


Want = Literal["token", "hidden"]
"""What a row is computed for: the next token, or the hidden state that a text's embedding is made of."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of one choice: everything a worker needs, and everything needed to start over elsewhere.

    `generated` holds tokens that were sampled before (a worker died, a turn is continued); they are part of the
    context and count towards `max_tokens`, but are not reported again.
    """

    id: int
    """64 bits, never repeats, also not after a restart."""
    prompt: tuple[int, ...]
    sampling: SamplingParams
    generated: tuple[int, ...] = ()
    mu: float | None = None
    """Mirostat's state after `generated`; None before the first token."""
    choice: int = 0
    """Index among the `n` choices of one call; part of the randomness."""
    stop: tuple[str, ...] = ()
    repetition_stop: bool = False
    """The answer ends where it only repeats itself. The front alone looks at it."""
    output: OutputFormat = OutputFormat()
    grammar: Grammar | None = None
    """What the answer has to be; None for anything."""
    reasoning_budget: int | None = None
    """After so many tokens of reasoning the tag comes that ends it; None: it ends by itself."""
    salt: bytes = b""
    """The tenant's salt: contexts with different salts never share KV."""
    share: str = ""
    """Whose share of the server it takes: a tenant's name, or a client's address where there are no keys."""
    timeout: float | None = None
    """Seconds from `add` after which the request ends with `DEADLINE`."""
    first_token_timeout: float | None = None
    """When it ends where it has no token by then. The front alone looks at it: a token is there when it has it."""
    priority: int = 0
    """Higher runs earlier than others of the same share; waiting raises it, so nobody starves."""
    durable: bool = False
    """Store this context's KV before that of others, and evict it after them: it is an agent's or a session's, or has
    an answer in it. Others are stored last, but for long ones, until they come a second time."""
    stored: bool = True
    """Whether its KV may be kept beyond the pool at all. Chunks hold the token ids, so a text that must not be stored
    must not come there either."""
    progress: bool = False
    """Whether each step of its prompt is told."""
    want: Want = "token"
    """`hidden`: nothing is generated; the last output has the text's `vector`."""
    second: int = 0
    """Where the second text of a pair begins, for a model whose two texts have types of their own; 0: there is one."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt needs at least one token")
        if not 0 <= self.id < 1 << 63:
            raise ValueError("a request id is a positive 64-bit number")

    @property
    def held(self) -> bool:
        """Whether not every token may come at every place of the answer."""
        return self.grammar is not None or self.reasoning_budget is not None
