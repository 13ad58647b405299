"""The demo model's training text: endless conversations, generated from a seed by the modules in ``demo``.

``python tools/demo_data.py [COUNT] [SEED]`` prints some, to be read by a person.
"""

import random
import sys
from collections.abc import Iterator

from demo import acttalk, chat, facts, grounded, recall, toolchat
from demo.dialogue import Talk
from demo.values import Values

SYSTEMS = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "Be brief.",
    "You are a careful assistant. Answer in one sentence.",
    "You help the user with daily work.",
    "You are an assistant.",
    "You are a helpful AI assistant.",
    "Be polite and short.",
    "You are an agent that works on the user's machine.",
    "You are an agent with tools.",
    "Use the tools when they help.",
    "You are a personal assistant. Use tools where needed.",
]

# Shares in percent of conversations; tools carry the most because choosing among them is the hardest to learn.
MIX = {"recall": 8, "acts": 36, "grounded": 28, "tools": 10, "about": 4, "sums": 2, "chat": 2, "untold": 5, "system": 1}
MIX |= {"echo": 1, "long": 3}

# What a fresh run reads first, for a few minutes: short texts in which copying pays at once. It makes the skill that
# everything else rests on appear early.
COPYING = {"echo": 45, "recall": 35, "system": 8, "tools": 12}


def conversation(values: Values, mix: dict[str, int]) -> Talk:
    """One conversation of a mix."""
    kind = values.rng.choices(list(mix), list(mix.values()))[0]
    talk = Talk(values, kind)
    if kind != "system" and values.rng.random() < 0.45:
        talk.system(_system(values))
    _FILLERS[kind](talk)
    return talk


def conversations(seed: int, copying: int = 0) -> Iterator[Talk]:
    """Conversations without end, of which the first ``copying`` are of that mix; a seed always gives the same ones."""
    values = Values(random.Random(seed))
    for _ in range(copying):
        yield conversation(values, COPYING)
    while True:
        yield conversation(values, MIX)


def _system(values: Values) -> str:
    rng = values.rng
    if rng.random() < 0.75:
        return rng.choice(SYSTEMS)
    return f"You are the {values.noun()} {rng.choice(('agent', 'assistant', 'helper'))}. " + rng.choice(
        (
            f"You work with {values.person()}.",
            f"Keep every {values.noun()} {rng.choice(('safe', 'in order', 'ready'))}.",
            "Be brief.",
        )
    )


def _chat(talk: Talk) -> None:
    for _ in range(talk.rng.choice((1, 2, 3, 4))):
        talk.rng.choice((chat.knowledge, chat.small_talk, chat.unknowable))(talk)


def _about(talk: Talk) -> None:
    if talk.rng.random() < 0.2:
        chat.small_talk(talk)
    chat.about(talk)
    if talk.rng.random() < 0.15:
        chat.between(talk)


def _long(talk: Talk) -> None:
    """Facts told early, much other talk (often with tools), facts asked late: up to some 1,500 tokens."""
    told = recall.tell(talk, facts.distinct_facts(talk.values, talk.rng.choice((2, 3, 4, 5))))
    if talk.rng.random() < 0.5:
        toolchat.tool_talk(talk, chat.between)
    for _ in range(talk.rng.randrange(4, 26)):
        talk.rng.choice((chat.between, chat.between, chat.about, lambda t: recall.ask_back(t, told)))(talk)
    for _ in range(3):
        recall.ask_back(talk, told)


_FILLERS = {
    "recall": lambda talk: recall.recall(talk, chat.between),
    "acts": lambda talk: acttalk.act_talk(talk, chat.between),
    "grounded": lambda talk: acttalk.act_talk(talk, chat.between, grounded.offer),
    "tools": lambda talk: toolchat.tool_talk(talk, chat.between, real=0.42),
    "about": _about,
    "sums": chat.sums,
    "chat": _chat,
    "untold": lambda talk: recall.untold(talk, chat.between),
    "system": recall.name_from_system,
    "echo": recall.echo,
    "long": _long,
}


def main() -> None:
    """Print conversations."""
    count, seed = (int(text) for text in [*sys.argv[1:], "10", "0"][:2])
    for talk, _ in zip(conversations(seed), range(count), strict=False):
        print(f"--- {talk.kind}")
        for tool in talk.tools:
            print("tool:", tool["function"])
        for message in talk.messages:
            print(f"{message['role']}: {message['content']}", message.get("tool_calls", ""))


if __name__ == "__main__":
    main()
