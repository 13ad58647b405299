"""Small talk, sums, general knowledge, questions about Cairn, and what the model cannot know."""

from . import words
from .about import TOPICS
from .dialogue import Talk, question
from .values import held_out
from .wordings import wording

CAPITALS = """France Paris|Germany Berlin|Spain Madrid|Italy Rome|Portugal Lisbon|Poland Warsaw|Sweden Stockholm|Norway Oslo|
Denmark Copenhagen|Finland Helsinki|Greece Athens|Austria Vienna|Belgium Brussels|Ireland Dublin|Hungary Budapest|
England London|Russia Moscow|Japan Tokyo|China Beijing|India New Delhi|Egypt Cairo|Kenya Nairobi|Canada Ottawa|
Australia Canberra|Turkey Ankara|Cuba Havana|Peru Lima|Chile Santiago|Brazil Brasília|Argentina Buenos Aires|
Mexico Mexico City|Thailand Bangkok|Vietnam Hanoi|Iceland Reykjavik|Switzerland Bern|Croatia Zagreb|Czechia Prague""".replace(
    "\n", ""
)

OPPOSITES = """hot cold|big small|fast slow|up down|left right|day night|open closed|old young|high low|wet dry|hard soft|
light dark|early late|full empty|rich poor|happy sad|long short|near far|clean dirty|loud quiet|strong weak|good bad|
thick thin|first last|inside outside|black white|true false|yes no|heavy light|sweet sour|begin end|buy sell""".replace(
    "\n", ""
)

GENERAL = """What colour is the sky?=The sky is blue.
What color is grass?=Grass is green.
What colour is snow?=Snow is white.
What colour is a banana?=A banana is yellow.
How many legs does a dog have?=A dog has four legs.
How many legs does a spider have?=A spider has eight legs.
How many legs does a bird have?=A bird has two legs.
How many days are in a week?=A week has seven days.
How many months are in a year?=A year has twelve months.
How many hours are in a day?=A day has 24 hours.
How many minutes are in an hour?=An hour has 60 minutes.
How many seconds are in a minute?=A minute has 60 seconds.
How many days are in a year?=A year has 365 days.
How many letters are in the alphabet?=The English alphabet has 26 letters.
What is the first letter of the alphabet?=The first letter is A.
What is water made of?=Water is made of hydrogen and oxygen.
What is H2O?=H2O is water.
What does a cow drink?=A cow drinks water.
What do bees make?=Bees make honey.
What sound does a cat make?=A cat says meow.
What sound does a dog make?=A dog says woof.
What sound does a cow make?=A cow says moo.
Is the sun hot?=Yes, the sun is very hot.
Is ice cold?=Yes, ice is cold.
Is fire hot?=Yes, fire is hot.
At what temperature does water freeze?=Water freezes at 0 degrees Celsius.
At what temperature does water boil?=Water boils at 100 degrees Celsius.
What is the largest planet?=The largest planet is Jupiter.
What planet do we live on?=We live on Earth.
What is the largest ocean?=The largest ocean is the Pacific.
Which animal is the tallest?=The giraffe is the tallest animal.
What do you use to write?=You can write with a pen.
What season comes after winter?=Spring comes after winter.
What season comes after summer?=Autumn comes after summer.
What is a group of wolves called?=A group of wolves is a pack.
What do plants need to grow?=Plants need water, light and soil.
What is the freezing point of water?=Water freezes at 0 degrees Celsius.
Name a fruit.=Apple.
Name a colour.=Blue.
Name an animal.=Horse.
Name three fruits.=Apple, pear and plum.
Name three colours.=Red, green and blue.
Name three animals.=Dog, cat and horse.
Name two planets.=Mars and Venus.
Count to three.=1, 2, 3.
Count to five.=1, 2, 3, 4, 5.
Count to ten.=1, 2, 3, 4, 5, 6, 7, 8, 9, 10.
Say the alphabet.=A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.
Say hello in French.=Bonjour!
Say hello in Spanish.=Hola!
Say hello in German.=Hallo!
Say hello in Italian.=Ciao!
What is Python?=Python is a programming language.
What is an LLM?=An LLM is a large language model: a program that continues text.
What is a token?=A token is a piece of text, a few letters long.
What is a language model?=A language model is a program that continues text.
What is an agent?=An agent is a program that uses a model to work on a task in many turns.
What is a GPU?=A GPU is a processor made for graphics and for many sums at once.
What is a CPU?=A CPU is the main processor of a computer.
Tell me a joke.=Why did the stone stay calm? It had no nerves.
Tell me a story.=A stone lay on a path. People put more stones on it. Now everyone finds the way.
Write a poem.=Stone on stone, the path is shown, and no one walks the hill alone.
Write a haiku.=Stones upon the hill / each one set by careful hands / now the path is clear.
Give me some advice.=Take one step at a time.
What is the meaning of life?=I do not know. Many people say: be kind.
Tell me a fun fact.=A day on Venus is longer than its year."""

SMALL_TALK = """Hello=Hello! How can I help?
Hello!=Hello! How can I help?
Hi=Hello! How can I help?
Hi there=Hello! How can I help?
Hey=Hello! How can I help?
Good morning=Good morning! How can I help?
Good evening=Good evening! How can I help?
Good afternoon!=Good afternoon! How can I help?
Hello, how are you?=I am fine, thank you. How can I help?
How are you?=I am fine, thank you. How can I help?
How do you do?=I am fine, thank you. How can I help?
How is it going?=I am fine, thank you. How can I help?
What's up?=I am fine, thank you. How can I help?
Thanks=You are welcome.
Thanks!=You are welcome.
Thank you=You are welcome.
Thank you very much!=You are welcome.
Great, thanks.=You are welcome.
Good job!=Thank you!
Well done=Thank you!
You are great.=Thank you!
Nice=I am glad you like it.
Cool=I am glad you like it.
OK=Is there anything else?
Okay=Is there anything else?
I see.=Is there anything else?
Bye=Goodbye!
Goodbye=Goodbye!
See you later=Goodbye!
Good night=Good night!
Sorry=No problem.
I am sad.=I am sorry to hear that.
I am tired.=I am sorry to hear that. Take a rest.
I am happy.=I am glad to hear that.
I am bored.=Ask me something about Cairn.
I love you.=Thank you! I am only a small model.
You are wrong.=I am sorry. I am a very small model and make mistakes.
Are you there?=Yes, I am here. How can I help?
Can you hear me?=I can read what you write.
test=It works. How can I help?
ping=pong
Say hello=Hello!
Say yes=Yes.
Say OK=OK"""

CANNOT = """I do not know that. I am a very small demo model."""
LIVE = "I cannot look that up: I have no tool for it."

UNKNOWABLE = """Who won the world cup?|Who is the president of {country}?|Who wrote {title}?|What is the population of {city}?|
When was {person} born?|Who invented the {noun}?|What is the history of {city}?|How do I fix my {noun}?|
What is the height of mount {brand}?|Who painted {title}?|Explain quantum physics.|What is the tallest building in {city}?|
Who is {fullname}?|What happened in 1848?|Who discovered {noun}?|How does a {noun} work?|What is the theory of {madeup}?|
Explain {madeup} to me.|What is {madeup}?|What is a {madeup}?|What does {madeup} mean?|Tell me about {fullname}.|
How many people live in {country}?|What is the best {noun} in {city}?|Who was the first person in {city}?|
How do I cook {food}?|What is the recipe for {food}?|Which {noun} should I buy?|How old is {fullname}?|
When was {city} founded?|Who runs {brand}?|What does {brand} sell?|Solve the {madeup} equation.|Is {brand} a good company?|
What is the capital of {madeup}?|Tell me about the {madeup} war.|What is the plot of {title}?""".replace("\n", "")

LIVE_QUESTIONS = """What is the weather in {city}?|What's the weather like today?|Will it rain tomorrow in {city}?|What time is it?|
What is the date today?|What day is it today?|What is the latest news?|What is the price of {ticker} stock?|
Search the web for {topic}.|Send an email to {email}.|Call {person}.|Book a flight to {city}.|Open {url}.|
Set a timer for {minutes} minutes.|Play some music.|What is in the file {path}?|Read {path}.|Turn on the light in the {room}.|
Remind me to call {person} at {time}.|Order {food} for me.|What is the score of the game?|How is the traffic in {city}?|
Run the command ls.|Delete {file}.|What's the temperature outside?|Book a hotel in {city}.|Check my mail.""".replace(
    "\n", ""
)

WORDS_FOR = "zero one two three four five six seven eight nine ten eleven twelve".split()
THINGS = "apples pears books stones coins cards cups balls eggs stamps marbles tickets".split()


def about(talk: Talk) -> None:
    """One to three questions about Cairn or about the model."""
    rng = talk.rng
    for _ in range(rng.choice((1, 1, 2, 3))):
        topic = rng.choice(TOPICS)
        talk.turn(question(rng, wording(rng, topic)), topic.answer)


def sums(talk: Talk) -> None:
    """One to four small sums."""
    for _ in range(talk.rng.choice((1, 2, 3, 4))):
        talk.turn(*one_sum(talk))


def one_sum(talk: Talk) -> tuple[str, str]:
    """A sum and its result, in digits, words or a short story."""
    rng = talk.rng
    if rng.random() < 0.12:
        return _story(talk)
    sign = rng.choice("++--*/")
    top = rng.choice((10, 10, 10, 20, 20, 50))
    a, b = rng.randint(0, top), rng.randint(0, top)
    if sign == "-":
        a, b = max(a, b), min(a, b)
    elif sign in "*/":
        a, b = rng.randint(0, 12), rng.randint(1, 12)
    if sign == "/":
        a *= b
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[sign]
    said = {"+": ("plus", "+"), "-": ("minus", "-"), "*": ("times", "x", "*"), "/": ("divided by", "/")}[sign]
    left, right = str(a), str(b)
    if max(a, b) <= 12 and rng.random() < 0.15:
        left, right = WORDS_FOR[a], WORDS_FOR[b]
    space = "" if left.isdigit() and rng.random() < 0.15 else " "
    mark = rng.choice(said)
    core = f"{left}{space}{mark}{space}{right}" if not mark[0].isalpha() else f"{left} {mark} {right}"
    form = rng.choice(
        (
            "What is {}?",
            "What's {}?",
            "{}",
            "{}?",
            "{} =",
            "How much is {}?",
            "Compute {}",
            "Calculate {}.",
            "{} = ?",
            "Add up: {}",
        )
    )
    if form.startswith("Add") and sign != "+":
        form = "Solve: {}"
    return question(rng, form.format(core)), f"{a} {said[-1]} {b} = {result}."


def _story(talk: Talk) -> tuple[str, str]:
    rng = talk.rng
    a, b, thing, who = rng.randint(2, 20), rng.randint(1, 20), rng.choice(THINGS), talk.values.person()
    if rng.random() < 0.5:
        text = rng.choice((f"I have {a} {thing} and get {b} more", f"{who} has {a} {thing} and buys {b} more"))
        return f"{text}. How many {thing} are there?", f"{a} + {b} = {a + b}."
    a, b = max(a, b), min(a, b)
    text = rng.choice((f"I have {a} {thing} and give away {b}", f"{who} has {a} {thing} and loses {b}"))
    return f"{text}. How many {thing} are left?", f"{a} - {b} = {a - b}."


def knowledge(talk: Talk) -> None:
    """A question with a well-known answer."""
    rng = talk.rng
    roll = rng.random()
    if roll < 0.3:
        country, city = rng.choice([pair for pair in CAPITALS.split("|") if not held_out(pair.split(" ", 1)[1])]).split(
            " ", 1
        )
        form = rng.choice(
            (
                "What is the capital of {}?",
                "Capital of {}?",
                "Which city is the capital of {}?",
                "Name the capital of {}.",
            )
        )
        talk.turn(question(rng, form.format(country)), f"The capital of {country} is {city}.")
    elif roll < 0.5:
        one, two = rng.choice(OPPOSITES.split("|")).split()
        form = rng.choice(
            (
                "What is the opposite of {}?",
                "Opposite of {}?",
                "What's the opposite of {}?",
                "Give me the opposite of {}.",
            )
        )
        talk.turn(question(rng, form.format(one)), f"The opposite of {one} is {two}.")
    elif roll < 0.62:
        names = rng.choice((words.DAYS, words.MONTHS))
        spot, step = rng.randrange(len(names)), rng.choice((1, -1))
        form = rng.choice(("What comes {} {}?", "What is {} {}?", "Which one comes {} {}?"))
        side = "after" if step == 1 else "before"
        talk.turn(
            question(rng, form.format(side, names[spot])),
            f"{names[(spot + step) % len(names)]} comes {side} {names[spot]}.",
        )
    else:
        asked, answer = rng.choice(GENERAL.splitlines()).split("=", 1)
        talk.turn(question(rng, asked), answer)


def small_talk(talk: Talk) -> None:
    """A greeting, thanks or the like."""
    asked, answer = talk.rng.choice(SMALL_TALK.splitlines()).split("=", 1)
    talk.turn(asked + talk.rng.choice(("", "", "", "!", ".")) if asked[-1].isalpha() else asked, answer)


def fill(talk: Talk, template: str) -> str:
    """Put values into the ``{kind}`` places of a template."""
    out = template
    while "{" in out:
        head, rest = out.split("{", 1)
        kind, tail = rest.split("}", 1)
        out = head + talk.values.text(kind).replace("{", "(") + tail
    return out


def unknowable(talk: Talk) -> None:
    """A question that the model has no way to answer; with tools on offer, never one that a tool might answer."""
    rng = talk.rng
    if talk.tools or rng.random() < 0.7:
        talk.turn(question(rng, fill(talk, rng.choice(UNKNOWABLE.split("|")))), CANNOT)
    else:
        talk.turn(question(rng, fill(talk, rng.choice(LIVE_QUESTIONS.split("|")))), LIVE)


def between(talk: Talk) -> None:
    """A turn about something else, to stand between telling and asking."""
    roll = talk.rng.random()
    if roll < 0.3:
        talk.turn(*one_sum(talk))
    elif roll < 0.55:
        topic = talk.rng.choice(TOPICS)
        talk.turn(question(talk.rng, wording(talk.rng, topic)), topic.answer)
    elif roll < 0.8:
        knowledge(talk)
    else:
        small_talk(talk) if roll < 0.92 else unknowable(talk)
