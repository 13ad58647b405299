"""Conversations in which the user tells something and asks for it later."""

from collections.abc import Callable
from dataclasses import dataclass

from .dialogue import Talk, join, question
from .values import Values

UNTOLD = "You have not told me that."
NOTED = ("Noted.", "Got it.", "OK, I will remember that.", "Thank you, I noted it.", "All right.", "I will keep that in mind.")


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing a user can tell: clauses that state it, questions for it, and the answer; ``{}`` is the value."""

    name: str
    kind: str
    clauses: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    greeting: str = ""


def _fact(name: str, kind: str, clauses: str, questions: str, answer: str, greeting: str = "") -> Fact:
    return Fact(name, kind, tuple(clauses.split("|")), tuple(questions.split("|")), answer, greeting)


FACTS = (
    _fact(
        "name",
        "anyone",
        "my name is {}|I am {}|I'm {}|you can call me {}|this is {}|people call me {}|the name is {}|I am called {}",
        "What is my name?|What's my name?|Who am I?|Do you remember my name?|What am I called?|Do you know my name?|"
        "Tell me my name.|What did I say my name was?|What name did I give you?|How am I called?|Say my name.",
        "Your name is {}.",
        "Nice to meet you, {}!|Hello, {}!|Hi {}! How can I help?|Pleased to meet you, {}.|Welcome, {}!",
    ),
    _fact(
        "city",
        "city",
        "I live in {}|I'm from {}|I am based in {}|my home is in {}|my city is {}|I come from {}|I am living in {}|"
        "home for me is {}|I moved to {}|my home town is {}",
        "Where do I live?|Which city do I live in?|What city am I from?|Where am I from?|Do you remember where I live?|"
        "What is my city?|Where is my home?|In which city do I live?|Where did I say I live?|What is my home town?|"
        "Which town am I from?",
        "You live in {}.",
    ),
    _fact(
        "number",
        "code",
        "my number is {}|my favourite number is {}|my lucky number is {}|the number is {}|the number to remember is {}|"
        "my secret number is {}|keep the number {} in mind",
        "What is my number?|What is my favourite number?|What number did I tell you?|Which number did I give you?|"
        "What was the number?|Do you remember my number?|Tell me the number.|What is the number?|What's my lucky number?",
        "The number is {}.",
    ),
    _fact(
        "code",
        "code",
        "the code is {}|my PIN is {}|the door code is {}|the access code is {}|use the code {}|my locker code is {}",
        "What is the code?|What was the code?|Which code did I give you?|What is my PIN?|Tell me the code.|"
        "Do you remember the code?|What is the door code?|Which code do I need?",
        "The code is {}.",
    ),
    _fact(
        "word",
        "word",
        "the code word is {}|the password is {}|the secret word is {}|remember the word {}|my password is {}|the magic word is {}",
        "What is the code word?|What is the password?|What was the secret word?|Which word did I give you?|"
        "Tell me the password.|What is the magic word?|What word should you remember?|What was the word?",
        "The word is {}.",
    ),
    _fact(
        "age",
        "level",
        "I am {} years old|my age is {}|I'm {} years old|I turned {} this year",
        "How old am I?|What is my age?|Do you remember how old I am?|What age did I say I am?|Tell me my age.",
        "You are {} years old.",
    ),
    _fact(
        "colour",
        "colour",
        "my favourite colour is {}|I like the colour {}|the colour I like best is {}|I love {} things",
        "What is my favourite colour?|Which colour do I like?|What colour do I like best?|What's my favorite color?",
        "Your favourite colour is {}.",
    ),
    _fact(
        "food",
        "food",
        "my favourite food is {}|I love {}|I like to eat {}|the food I like best is {}",
        "What is my favourite food?|What do I like to eat?|Which food do I like best?|What food do I love?",
        "Your favourite food is {}.",
    ),
    _fact(
        "job",
        "job",
        "I work as a {}|I am a {}|my job is {}|I'm a {} by trade|I earn my living as a {}",
        "What is my job?|What do I do for a living?|What do I work as?|Do you remember my job?|What is my profession?",
        "You work as a {}.",
    ),
    _fact(
        "company",
        "brand",
        "I work at {}|I work for {}|my company is {}|my employer is {}|my company is called {}",
        "Where do I work?|Which company do I work for?|Who is my employer?|What is my company called?",
        "You work at {}.",
    ),
    _fact(
        "email",
        "email",
        "my email is {}|my email address is {}|you can reach me at {}|my mail address is {}",
        "What is my email address?|What's my email?|Which email did I give you?|How can I be reached by mail?",
        "Your email address is {}.",
    ),
    _fact(
        "phone",
        "phone",
        "my phone number is {}|my telephone number is {}|call me at {}",
        "What is my phone number?|What's my telephone number?|At which number can I be called?",
        "Your phone number is {}.",
    ),
    _fact(
        "order",
        "id",
        "my order is {}|my order number is {}|the ticket is {}|the ticket number is {}|the order id is {}",
        "What is my order number?|Which ticket did I mention?|What is the order id?|What is the ticket number?",
        "The number is {}.",
    ),
    _fact(
        "deadline",
        "date",
        "the deadline is {}|it is due {}|the due date is {}|everything must be ready by {}",
        "When is the deadline?|What is the deadline?|When is it due?|By when must it be ready?",
        "The deadline is {}.",
    ),
    _fact(
        "meeting",
        "time",
        "the meeting is at {}|we meet at {}|my appointment is at {}|the call starts at {}",
        "When is the meeting?|At what time do we meet?|What time is my appointment?|When does the call start?",
        "It is at {}.",
    ),
    _fact(
        "file",
        "path",
        "the file is {}|my notes are in {}|the report is in {}|I saved it in {}",
        "Where is the file?|Which file did I name?|Where are my notes?|Where did I save it?|Where is the report?",
        "It is {}.",
    ),
    _fact(
        "project",
        "label",
        "my project is called {}|the project is {}|I am working on {}|the project name is {}",
        "What is my project called?|What am I working on?|What is the project name?|Which project is it?",
        "Your project is called {}.",
    ),
    _fact(
        "language",
        "language",
        "I speak {}|my language is {}|my mother tongue is {}|I am learning {}",
        "Which language do I speak?|What is my mother tongue?|What is my language?|Which language am I learning?",
        "Your language is {}.",
    ),
    _fact(
        "sport",
        "sport",
        "my favourite sport is {}|I play {}|my hobby is {}|I like {}",
        "What is my favourite sport?|Which sport do I play?|What is my hobby?|What sport do I like?",
        "Your sport is {}.",
    ),
    _fact(
        "day",
        "day",
        "my day off is {}|I am free on {}|the party is on {}|we leave on {}",
        "What is my day off?|On which day am I free?|When is the party?|On what day do we leave?",
        "It is {}.",
    ),
)

RELATIVES = "dog cat sister brother mother father wife husband son daughter boss friend neighbour teacher horse boat bike".split()
RELATIVES += "parrot cousin uncle aunt manager doctor colleague car robot plant rabbit hamster goldfish".split()


def relative_fact(v: Values) -> Fact:
    """A fact about the name of somebody or something of the user's."""
    who = v.pick(RELATIVES) if v.rng.random() < 0.75 else v.noun()
    return _fact(
        who,
        "person",
        f"my {who} is called {{}}|my {who}'s name is {{}}|I have a {who} named {{}}|the name of my {who} is {{}}|"
        f"I have a {who} called {{}}",
        f"What is my {who}'s name?|What is my {who} called?|What's the name of my {who}?|Who is my {who}?|"
        f"Do you remember my {who}'s name?|Tell me the name of my {who}.|How is my {who} called?",
        f"Your {who} is called {{}}.",
    )


def thing_fact(v: Values) -> Fact:
    """A fact about any noun: the user's, or simply "the"."""
    noun = v.noun() if v.rng.random() < 0.6 else v.phrase()
    the, your = v.rng.choice((("my", "your"), ("the", "the"), ("our", "your")))
    kind = v.pick("code word brand colour label id date city person email level noun phrase foreign float title adjective".split())
    return _fact(
        noun,
        kind,
        f"{the} {noun} is {{}}|{the} {noun}: {{}}|{the} {noun} has the value {{}}|I set {the} {noun} to {{}}",
        f"What is {the} {noun}?|What's {the} {noun}?|Tell me {the} {noun}.|What was {the} {noun}?|"
        f"Do you remember {the} {noun}?|Which {noun} did I give you?|What did I say {the} {noun} is?",
        f"{your.capitalize()} {noun} is {{}}.",
    )


def person_fact(v: Values) -> Fact:
    """A fact about somebody else, told and asked by name."""
    who = v.anyone()
    kind, clause, asked, answer = v.rng.choice(
        (
            ("city", "lives in {}|{w} is from {}|{w} moved to {}", "Where does {w} live?|Which city does {w} live in?", "lives in {}."),
            ("job", "works as a {}|{w} is a {}", "What does {w} do?|What is {w}'s job?|What does {w} work as?", "works as a {}."),
            ("brand", "works at {}|{w} works for {}", "Where does {w} work?|Which company does {w} work for?", "works at {}."),
            ("food", "likes {}|{w} loves {}", "What does {w} like?|Which food does {w} love?", "likes {}."),
            ("code", "has the number {}|the number of {w} is {}", "What is {w}'s number?|Which number does {w} have?", "has the number {}."),
            ("phrase", "has a {}|{w} owns a {}", "What does {w} have?|What does {w} own?", "has a {}."),
            ("email", "has the email {}|{w}'s email is {}", "What is {w}'s email?|How can I mail {w}?", "has the email {}."),
        )
    )
    clauses = "|".join(part if "{w}" in part else f"{{w}} {part}" for part in clause.split("|"))
    return _fact(who, kind, clauses.replace("{w}", who), asked.replace("{w}", who), f"{who} {answer}")


def any_fact(v: Values) -> Fact:
    """Names, cities and numbers most often; the rest for breadth."""
    roll = v.rng.random()
    if roll < 0.36:
        return v.rng.choice(FACTS[:3])
    if roll < 0.56:
        return v.rng.choice(FACTS[3:])
    if roll < 0.7:
        return relative_fact(v)
    return thing_fact(v) if roll < 0.86 else person_fact(v)


def distinct_facts(v: Values, count: int) -> list[Fact]:
    """Facts whose questions cannot be mistaken for one another."""
    facts: dict[str, Fact] = {}
    groups = {"order": "number", "code": "number", "phone": "number", "meeting": "day"}
    while len(facts) < count:
        fact = any_fact(v)
        facts.setdefault(groups.get(fact.name, fact.name), fact)
    return list(facts.values())


def tell(talk: Talk, facts: list[Fact]) -> list[tuple[Fact, str]]:
    """State the facts in one message or in several; returns each with its value."""
    v, rng = talk.values, talk.rng
    told = [(fact, v.text(fact.kind)) for fact in facts]
    while_left = list(told)
    while while_left:
        size = min(len(while_left), rng.choice((1, 1, 2, 2, 3)))
        group, while_left = while_left[:size], while_left[size:]
        parts = [rng.choice(fact.clauses).format(value) for fact, value in group]
        lead = rng.choice(("", "", "", "Hello, ", "Hi! ", "Remember: ", "Please note: ", "By the way, ", "Hey, ", "Note that ", "FYI "))
        text = ". ".join(p[0].upper() + p[1:] for p in parts) if rng.random() < 0.3 else lead + join(rng, parts)
        talk.user(text + rng.choice((".", ".", "", "!")))
        talk.messages.append({"role": "assistant", "content": _acknowledge(talk, group)})
    return told


def _acknowledge(talk: Talk, group: list[tuple[Fact, str]]) -> str:
    rng = talk.rng
    fact, value = group[0]
    if fact.greeting:
        return rng.choice(fact.greeting.split("|")).format(value)
    if rng.random() < 0.4:
        return "Noted: " + _lower(fact.answer.format(value))
    return rng.choice(NOTED)


def _lower(text: str) -> str:
    return text[0].lower() + text[1:] if text.startswith(("You", "The ", "It ")) else text


def ask_back(talk: Talk, told: list[tuple[Fact, str]]) -> None:
    """Ask for one of the facts, or for two at once."""
    rng = talk.rng
    if len(told) > 1 and rng.random() < 0.12:
        (one, first), (two, second) = rng.sample(told, 2)
        asked = f"{rng.choice(one.questions).rstrip('?.')}, and {_lower_question(rng.choice(two.questions))}"
        talk.turn(asked, f"{one.answer.format(first)} {two.answer.format(second)}")
        return
    fact, value = rng.choice(told)
    talk.turn(question(rng, rng.choice(fact.questions)), fact.answer.format(value))


def _lower_question(text: str) -> str:
    return text[0].lower() + text[1:]


def correct(talk: Talk, told: list[tuple[Fact, str]]) -> None:
    """Change one fact; the later value counts."""
    rng = talk.rng
    spot = rng.randrange(len(told))
    fact, _ = told[spot]
    value = talk.values.text(fact.kind)
    lead = rng.choice(("Actually, ", "Correction: ", "Sorry, I was wrong: ", "Update: ", "No, wait, "))
    talk.turn(lead + rng.choice(fact.clauses).format(value) + ".", rng.choice(NOTED))
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
    """Some facts are told, another is asked for."""
    rng = talk.rng
    facts = distinct_facts(talk.values, rng.choice((1, 2, 2, 3, 3)))
    hidden, told = facts[0], tell(talk, facts[1:]) if len(facts) > 1 else []
    if not told and rng.random() < 0.5:
        between(talk)
    if told and rng.random() < 0.6:
        ask_back(talk, told)
    talk.turn(question(rng, rng.choice(hidden.questions)), UNTOLD)
    if told and rng.random() < 0.5:
        ask_back(talk, told)
    if rng.random() < 0.4:
        ask_back(talk, tell(talk, [hidden]))


def echo(talk: Talk) -> None:
    """Repeat a text word for word: practice in copying, over every kind of value."""
    v, rng = talk.values, talk.rng
    for _ in range(rng.choice((1, 2, 3))):
        kinds = "anyone city code word phrase sentence topic label id email path foreign title madeup brand float url"
        text = " ".join(v.text(v.pick(kinds.split())) for _ in range(rng.choice((1, 1, 2, 3))))
        lead = rng.choice(("Repeat: ", "Repeat after me: ", "Say ", "Echo: ", "Repeat this: ", "Say this: ", "Please say: "))
        talk.turn(lead + text, text)


def name_from_system(talk: Talk) -> None:
    """A system message gives the assistant a name and a fact; the user asks for them."""
    v, rng = talk.values, talk.rng
    name, told = v.person(), tell_in_system(v)
    role = rng.choice(("a helpful assistant", f"an assistant of {v.text('brand')}", "a friendly helper", f"the {v.noun()} agent"))
    facts = " ".join(part for part, _, _ in told)
    talk.system(f"You are {name}, {role}. {facts}".strip())
    asked = [("What is your name?", f"My name is {name}."), ("Who are you?", f"My name is {name}."), ("What's your name?", f"My name is {name}.")]
    asked = [rng.choice(asked)] + [(q, a) for _, q, a in told]
    rng.shuffle(asked)
    for asked_text, answer in asked:
        talk.turn(question(rng, asked_text), answer)


def tell_in_system(v: Values) -> list[tuple[str, str, str]]:
    """Facts as they stand in a system message: sentence, question, answer."""
    facts = []
    for fact in distinct_facts(v, v.rng.choice((0, 1, 1, 2))):
        value = v.text(fact.kind)
        if fact.clauses[0].startswith("the ") or not fact.clauses[0].startswith(("my", "I ")):
            sentence = fact.clauses[0].format(value)
            facts.append((sentence[0].upper() + sentence[1:] + ".", v.rng.choice(fact.questions), fact.answer.format(value)))
        elif fact.name in ("name", "city", "company", "job"):
            said = {"name": "The user is called {}.", "city": "The user lives in {}.", "company": "The user works at {}."}
            sentence = said.get(fact.name, "The user works as a {}.").format(value)
            facts.append((sentence, v.rng.choice(fact.questions), fact.answer.format(value)))
    return facts
