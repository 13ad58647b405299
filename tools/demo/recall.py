"""Conversations in which the user tells something and asks for it later."""

from collections.abc import Callable

from .dialogue import AS_IS, Talk, join, question
from .facts import Fact, distinct_facts, fill, unlike
from .values import Values

UNTOLD = "You have not told me that."
NOTED = (
    "Noted.",
    "Got it.",
    "OK, I will remember that.",
    "Thank you, I noted it.",
    "All right.",
    "I will keep that in mind.",
)


def tell(talk: Talk, facts: list[Fact]) -> list[tuple[Fact, str]]:
    """State the facts in one message or in several; returns each with its value."""
    v, rng = talk.values, talk.rng
    told = [(fact, fact.value(v)) for fact in facts]
    while_left = list(told)
    while while_left:
        size = min(len(while_left), rng.choice((1, 1, 2, 2, 3)))
        group, while_left = while_left[:size], while_left[size:]
        clauses = [rng.choice(fact.clauses) for fact, _ in group]
        parts = [fill(clause, value) for clause, (_, value) in zip(clauses, group, strict=True)]
        lead = rng.choice(
            (
                "",
                "",
                "",
                "Hello, ",
                "Hi! ",
                "Remember: ",
                "Please note: ",
                "By the way, ",
                "Hey, ",
                "Note that ",
                "FYI ",
            )
        )
        if rng.random() < 0.3:
            lead = ""
            # A value at the start keeps its first letter: the answer must repeat it as it was told.
            text = ". ".join(
                p if c.startswith("{}") else p[0].upper() + p[1:] for c, p in zip(clauses, parts, strict=True)
            )
        else:
            text = lead + join(rng, parts)
        mark = AS_IS if not lead and clauses[0].startswith("{}") else ""
        talk.user(mark + text + rng.choice((".", ".", "", "!")))
        talk.messages.append({"role": "assistant", "content": _acknowledge(talk, group)})
    return told


def _acknowledge(talk: Talk, group: list[tuple[Fact, str]]) -> str:
    rng = talk.rng
    fact, value = group[0]
    if fact.greeting:
        return fill(rng.choice(fact.greeting.split("|")), value)
    if rng.random() < 0.4:
        return "Noted: " + _lower(fill(fact.answer, value))
    return rng.choice(NOTED)


def _lower(text: str) -> str:
    return text[0].lower() + text[1:] if text.startswith(("You", "The ", "It ")) else text


def ask_back(talk: Talk, told: list[tuple[Fact, str]]) -> None:
    """Ask for one of the facts, or for two at once."""
    rng = talk.rng
    if len(told) > 1 and rng.random() < 0.12:
        (one, first), (two, second) = rng.sample(told, 2)
        asked = f"{rng.choice(one.questions).rstrip('?.')}, and {_lower_question(rng.choice(two.questions))}"
        talk.turn(asked, f"{fill(one.answer, first)} {fill(two.answer, second)}")
        return
    fact, value = rng.choice(told)
    others = [other for other, _ in told if other is not fact]
    talk.turn(question(rng, rng.choice(_questions(fact, others))), fill(fact.answer, value))


def _questions(fact: Fact, others: list[Fact]) -> tuple[str, ...]:
    """What may be asked for a fact; vague questions only where no other value is of the same sort."""
    return fact.questions if any(fact.sort == other.sort for other in others) else fact.questions + fact.vague


def _lower_question(text: str) -> str:
    return text[0].lower() + text[1:]


def correct(talk: Talk, told: list[tuple[Fact, str]]) -> None:
    """Change one fact; the later value counts."""
    rng = talk.rng
    spot = rng.randrange(len(told))
    fact, _ = told[spot]
    value = fact.value(talk.values)
    lead = rng.choice(("Actually, ", "Correction: ", "Sorry, I was wrong: ", "Update: ", "No, wait, "))
    talk.turn(lead + fill(rng.choice(fact.clauses), value) + ".", rng.choice(NOTED))
    told[spot] = (fact, value)


def recall(talk: Talk, between: Callable[[Talk], None]) -> None:
    """A whole conversation: tell one to four facts, talk of other things, ask back."""
    rng = talk.rng
    told = tell(talk, distinct_facts(talk.values, rng.choice((1, 1, 2, 2, 3, 4))))
    if rng.random() < 0.1:
        correct(talk, told)
    for _ in range(rng.choice((1, 2, 2, 3))):
        for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
            between(talk)
        ask_back(talk, told)


def untold(talk: Talk, between: Callable[[Talk], None]) -> None:
    """Some facts are told, another is asked for; told facts are asked for too, and at times the other is then told."""
    rng = talk.rng
    facts = distinct_facts(talk.values, rng.choice((0, 1, 1, 2, 2, 3)))
    hidden, told = unlike(talk.values, facts), tell(talk, facts)
    if not told and rng.random() < 0.5:
        between(talk)
    if told and rng.random() < 0.7:
        ask_back(talk, told)
    asked = rng.choice(hidden.questions)
    talk.turn(question(rng, asked), UNTOLD)
    if told and rng.random() < 0.7:
        ask_back(talk, told)
    if rng.random() < 0.35:
        [(fact, value)] = tell(talk, [hidden])
        if rng.random() < 0.3:
            between(talk)
        again = asked if rng.random() < 0.5 else rng.choice(fact.questions)
        talk.turn(question(rng, again), fill(fact.answer, value))


def echo(talk: Talk) -> None:
    """Repeat a text word for word: practice in copying, over every kind of value."""
    v, rng = talk.values, talk.rng
    for _ in range(rng.choice((1, 2, 3))):
        kinds = "anyone city code word phrase sentence topic label id email path foreign title madeup brand float url"
        text = " ".join(v.text(v.pick(kinds.split())) for _ in range(rng.choice((1, 1, 2, 3))))
        lead = rng.choice(
            ("Repeat: ", "Repeat after me: ", "Say ", "Echo: ", "Repeat this: ", "Say this: ", "Please say: ")
        )
        talk.turn(lead + text, text)


def name_from_system(talk: Talk) -> None:
    """A system message gives the assistant a name and a fact; the user asks for them."""
    v, rng = talk.values, talk.rng
    name, told = v.person(), tell_in_system(v)
    role = rng.choice(
        ("a helpful assistant", f"an assistant of {v.text('brand')}", "a friendly helper", f"the {v.noun()} agent")
    )
    facts = " ".join(part for part, _, _ in told)
    talk.system(f"You are {name}, {role}. {facts}".strip())
    asked = [
        ("What is your name?", f"My name is {name}."),
        ("Who are you?", f"My name is {name}."),
        ("What's your name?", f"My name is {name}."),
    ]
    asked = [rng.choice(asked)] + [(q, a) for _, q, a in told]
    rng.shuffle(asked)
    for asked_text, answer in asked:
        talk.turn(question(rng, asked_text), answer)


def tell_in_system(v: Values) -> list[tuple[str, str, str]]:
    """Facts as they stand in a system message: sentence, question, answer."""
    facts = []
    said = {
        "name": "The user is called {}.",
        "city": "The user lives in {}.",
        "company": "The user works at {}.",
        "job": "The user works as a {}.",
    }
    for fact in distinct_facts(v, v.rng.choice((0, 1, 1, 2))):
        value, clause = fact.value(v), fact.clauses[0]
        if fact.name not in said and clause.startswith(("I ", "I'", "we ", "our ")):
            continue
        own = clause.replace("my ", "the user's ", 1) if clause.startswith("my ") else clause
        sentence = fill(said.get(fact.name, own + "."), value)
        facts.append((sentence[0].upper() + sentence[1:], v.rng.choice(fact.questions), fill(fact.answer, value)))
    return facts
