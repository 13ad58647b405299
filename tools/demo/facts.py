"""Things that a user can tell: names, places, numbers and the rest, with their wordings."""

from dataclasses import dataclass

from .values import Values


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
        "my name is {}|I am {}|I'm {}|you can call me {}|this is {}|people call me {}|the name is {}|I am called {}|"
        "{} is my name|they call me {}|I go by {}|my friends call me {}|hi from {}|you are talking to {}|I was named {}|"
        "my parents named me {}|it is me, {}|{} is what people call me|my first name is {}|I answer to {}",
        "What is my name?|What's my name?|Who am I?|Do you remember my name?|What am I called?|Do you know my name?|"
        "Tell me my name.|What did I say my name was?|What name did I give you?|How am I called?|Say my name.|"
        "Could you say my name?|Which name did I tell you?|Remind me of my name.|Do you recall my name?|Who is speaking?|"
        "What do people call me?|Can you tell me my name?|Which name do I have?|Have I told you my name?|Who are you talking to?",
        "Your name is {}.",
        "Nice to meet you, {}!|Hello, {}!|Hi {}! How can I help?|Pleased to meet you, {}.|Welcome, {}!",
    ),
    _fact(
        "city",
        "city",
        "I live in {}|I'm from {}|I am based in {}|my home is in {}|my city is {}|I come from {}|I am living in {}|"
        "home for me is {}|I moved to {}|my home town is {}|"
        "{} is where I live|I grew up in {}|my flat is in {}|greetings from {}|I study in {}|my house is in {}|I am in {} now|"
        "I am staying in {}|my family is from {}|{} is my home|I spend my days in {}|I settled in {}",
        "Where do I live?|Which city do I live in?|What city am I from?|Where am I from?|Do you remember where I live?|"
        "What is my city?|Where is my home?|In which city do I live?|Where did I say I live?|What is my home town?|"
        "Which town am I from?|Remind me where I live.|What town did I name?|Which place did I mention?|Where am I staying?|"
        "Do you know where I live?|What city did I tell you?|Where is my house?|In what town am I?|Can you say where I live?",
        "You live in {}.",
    ),
    _fact(
        "number",
        "code",
        "my number is {}|my favourite number is {}|my lucky number is {}|the number is {}|the number to remember is {}|"
        "my secret number is {}|keep the number {} in mind|"
        "{} is my number|{} is the number|take down the number {}|my ticket has the number {}|the figure is {}|"
        "my room has the number {}|my house number is {}|I drew the number {}|here is a number: {}|my score is {}",
        "What is my number?|What is my favourite number?|What number did I tell you?|Which number did I give you?|"
        "What was the number?|Do you remember my number?|Tell me the number.|What is the number?|What's my lucky number?|"
        "Remind me of the number.|Which number is mine?|Can you repeat the number?|What number did I mention?|"
        "Which number should you remember?|What is the number that I told you?|Say the number again.|What number do I have?",
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
    kind = v.pick(
        "code word brand colour label id date city person email level noun phrase float title adjective".split()
    )
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
            (
                "city",
                "lives in {}|{w} is from {}|{w} moved to {}",
                "Where does {w} live?|Which city does {w} live in?",
                "lives in {}.",
            ),
            (
                "job",
                "works as a {}|{w} is a {}",
                "What does {w} do?|What is {w}'s job?|What does {w} work as?",
                "works as a {}.",
            ),
            (
                "brand",
                "works at {}|{w} works for {}",
                "Where does {w} work?|Which company does {w} work for?",
                "works at {}.",
            ),
            ("food", "likes {}|{w} loves {}", "What does {w} like?|Which food does {w} love?", "likes {}."),
            (
                "code",
                "has the number {}|the number of {w} is {}",
                "What is {w}'s number?|Which number does {w} have?",
                "has the number {}.",
            ),
            ("phrase", "has a {}|{w} owns a {}", "What does {w} have?|What does {w} own?", "has a {}."),
            (
                "email",
                "has the email {}|{w}'s email is {}",
                "What is {w}'s email?|How can I mail {w}?",
                "has the email {}.",
            ),
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
