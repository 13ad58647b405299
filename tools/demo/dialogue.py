"""A conversation under construction, and the small variations that keep wordings from being learnt by heart."""

import random
from dataclasses import dataclass, field
from typing import Any

from .values import Values

Message = dict[str, Any]

# Marks a text that starts with a value, whose first letter must stay as it is.
AS_IS = "\0"
# First words that may be written small after an opener.
SMALL = set(
    """What Which Who Where When Why How Is Are Am Do Does Did Can Could Will Would Should Has Have Was Were Tell
Name Give Say Explain Describe Remind What's Show Please Any In On At The My Your This That""".split()
)

OPENERS = (
    "Hey, ",
    "Hi, ",
    "Hello, ",
    "OK, ",
    "So, ",
    "Quick question: ",
    "One more thing: ",
    "Now ",
    "And ",
    "Well, ",
    "Also, ",
)
ASKS = (
    "Can you {}?",
    "Could you {}?",
    "Would you {}?",
    "Please {}.",
    "please {}",
    "I want you to {}.",
    "I need you to {}.",
)
ASKS += (
    "I'd like you to {}.",
    "Could you please {}?",
    "Can you please {}?",
    "Would you mind? I need you to {}.",
    "Go ahead and {}.",
)
TAILS = (" please", ", please", " for me", ", thanks", " now", " please.", ". Thanks!", ". Thank you.")


@dataclass(slots=True)
class Talk:
    """Messages so far, the tools on offer, and the source of values."""

    values: Values
    kind: str = ""
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    separate: bool = False
    """Whether each request stands by itself behind the tools and sees no other: all are read as the first."""

    @property
    def rng(self) -> random.Random:
        """The one source of chance of this conversation."""
        return self.values.rng

    def system(self, text: str) -> None:
        """Set the system message; it must be the first."""
        self.messages.append({"role": "system", "content": text})

    def turn(self, user: str, assistant: str) -> None:
        """One question and its answer."""
        self.user(user)
        self.messages.append({"role": "assistant", "content": assistant})

    def user(self, text: str) -> None:
        """A user message; its first letter is made upper case three times in four."""
        if self.rng.random() < 0.75 and not text.startswith(AS_IS):
            text = text[:1].upper() + text[1:]
        self.messages.append({"role": "user", "content": text.removeprefix(AS_IS)})

    def call(self, name: str, arguments: dict[str, Any]) -> None:
        """An assistant message that calls one tool."""
        function = {"name": name, "arguments": arguments}
        self.messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )

    def tool_result(self, content: str, answer: str) -> None:
        """What the tool returned and what the assistant makes of it."""
        self.messages.append({"role": "tool", "content": content})
        self.messages.append({"role": "assistant", "content": answer})


def lower_first(text: str) -> str:
    """Lower the first letter when the first word is a common one; names keep theirs."""
    return text[0].lower() + text[1:] if text.split(" ", 1)[0] in SMALL else text


def ask(rng: random.Random, text: str) -> str:
    """Vary a request: an imperative (written in lower case) is wrapped, a question is opened or loses its mark."""
    roll = rng.random()
    if text.startswith(AS_IS):
        return text
    if text[0].islower():
        if roll < 0.35:
            return text
        if roll < 0.5:
            return text + rng.choice((".", ".", "!"))
        if roll < 0.8:
            return rng.choice(ASKS).format(text)
        return text + rng.choice(TAILS) if roll < 0.92 else rng.choice(OPENERS) + text
    if roll < 0.7:
        return text
    if roll < 0.85:
        return rng.choice(OPENERS) + lower_first(text)
    if roll < 0.93:
        return text.rstrip("?.")
    end = "" if text[-1] in "?.!" else "."
    return text + end + rng.choice((" Thanks.", " Please.", " Thank you!", " I need to know.", " Tell me."))


def question(rng: random.Random, text: str) -> str:
    """Vary a question more freely: openers, lower case, no mark, and rarely a dropped or doubled letter."""
    roll = rng.random()
    if roll < 0.12:
        text = rng.choice(("Please tell me: ", "Tell me, ", "I have a question. ", "I want to know: ", "Say, ")) + text
    elif roll < 0.3:
        text = rng.choice(OPENERS) + lower_first(text)
    if rng.random() < 0.12:
        text = lower_first(text)
    if rng.random() < 0.15:
        text = text.rstrip("?.")
    if rng.random() < 0.06:
        spot = rng.randrange(1, len(text))
        text = text[:spot] + (text[spot + 1 :] if rng.random() < 0.5 else text[spot - 1] + text[spot:])
    return (
        text + rng.choice((" Thanks.", " Please be brief.", " Answer in one sentence."))
        if rng.random() < 0.05
        else text
    )


def join(rng: random.Random, parts: list[str]) -> str:
    """Several clauses as one sentence."""
    if len(parts) == 1:
        return parts[0]
    mark = rng.choice((" and ", ", and ", " and "))
    return ", ".join(parts[:-1]) + mark + parts[-1]
