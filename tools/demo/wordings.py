"""More ways to ask about Cairn: parts of sentences that fit common frames, and words that can stand for each other.

A list of questions teaches a small model those questions; parts times frames teach it which words matter. The key of
each entry is the answer's first words in about.py.
"""

import random

from .about import TOPICS, Topic

# Noun phrases and indirect questions | verb phrases | statements, each separated by "/".
PARTS = {
    "Cairn is an LLM": "Cairn/the Cairn server/what Cairn is/what Cairn does/what kind of thing Cairn is/the purpose of Cairn"
    "||Cairn is a server/Cairn is a library/Cairn is a program",
    "Run `cairn serve`": "the start command/how Cairn is started/the command for starting the server/which command to run"
    "/how to start Cairn/the way to launch the server"
    "|start the server/launch Cairn/run Cairn/start Cairn/get it going/boot the server/turn Cairn on/bring up a server|",
    "Any OpenAI or": "the clients that work/which clients work/the supported APIs/the client support/the API of Cairn"
    "/which SDK to use|use the OpenAI client/connect the Anthropic SDK/use my OpenAI code/connect my client/call the API"
    "|Cairn speaks the OpenAI API/OpenAI clients work/the Anthropic client works/there is an OpenAI API",
    "By default Cairn listens": "the default port/the server's address/the base URL/the port of the server/which port it uses"
    "/the URL of the API/where the server listens/the endpoint/the server URL|reach the server/find the server|",
    "A context computed": "the main idea/what makes Cairn special/the advantage of Cairn/the benefit of Cairn/the reason to use Cairn"
    "/why Cairn exists/the selling point of Cairn/how Cairn differs from others/what is special here||"
    "Cairn is special/Cairn is better than other servers",
    "Cairn keeps contexts": "what a restart does/the effect of a crash/what happens on a crash/crash recovery/how a restart works"
    "|restart the server/stop the server/crash the server/reboot my machine/kill the server/shut Cairn down"
    "|the context is lost after a crash/a restart deletes the context/my context survives a crash/a crash loses everything",
    "Cairn needs no GPU": "the hardware needed/which hardware is required/the hardware requirements"
    "|use Cairn without a GPU/run it on my laptop/use only a CPU/run Cairn on an old computer/work without a graphics card"
    "|Cairn needs a GPU/a GPU is needed/the CPU is enough/a graphics card is required/it works on a CPU",
    "No. Cairn needs no": "the torch dependency|use Cairn without torch/skip PyTorch/leave torch out"
    "|torch is needed/Cairn needs PyTorch/I must install torch/PyTorch is required/torch is a requirement",
    "Cairn uses continuous": "the batching/how batching works/continuous batching/the way requests are batched/how many requests are served"
    "|send many requests at once/serve many users/run several agents at once/make parallel requests"
    "|Cairn batches requests/Cairn does batching/requests are batched/it handles many requests at once",
    "Prefix caching reuses": "prefix caching/the prefix cache/how prefixes are cached/shared prefixes/the caching of prefixes"
    "|share a prompt between requests/reuse a prefix|Cairn has prefix caching/Cairn reuses prefixes/prefixes are cached",
    "The KV cache holds": "the KV cache/a KV cache/what the KV cache is/the paged KV cache/the content of the KV cache"
    "||Cairn has a KV cache/the KV cache is paged",
    "Cairn is built to give": "whether answers are reproducible/the effect of caching on answers/how batching affects the answer"
    "|get the same answer twice/get a different answer from the cache"
    "|the cache changes the answer/batching changes the answer/answers are the same/the answer depends on the batch"
    "/results are reproducible/caching alters the output/a cached answer differs",
    "In Cairn an agent": "the agent operations/what agents can do/the agent features/the functions for agents/the agent commands"
    "|do things with an agent/manage my agents/work with agents|",
    "Forking makes": "forking/what a fork is/the fork operation/an agent fork|fork an agent/fork my agent/make a fork/copy an agent/branch an agent|",
    "Rolling back takes": "rollback/rolling back/the rollback operation|roll back an agent/roll my agent back/undo a turn/go back a turn"
    "/undo the last turn/return to an earlier turn|",
    "Pinning keeps": "pinning/what pinning is/the pin operation|pin an agent/pin my agent/pin a context|",
    "Exporting writes": "exporting/the export operation/agent export|export an agent/export my agent/move an agent to another machine"
    "/take my agent along/send an agent to another computer|",
    "When you swap": "a model swap/what a model swap does/swapping models|swap the model/change the model/switch models/use another model"
    "/replace the model/exchange the model|the context is lost when the model changes/a model swap deletes the context",
    "Cairn is under": "the licence/Cairn's licence/the license of the project/the price of Cairn/the cost/the licence terms"
    "|use Cairn for free/use it at my company/get Cairn for free|Cairn is free/Cairn is open source/it costs money/I have to pay",
    "A cairn is a pile": "the meaning of cairn/the word cairn/the name Cairn/the origin of the name/what the name means/why it has that name||",
    "Cairn is for people": "who Cairn is for/the audience/who should use it/the target users/who it was made for||Cairn is for developers",
    "Cairn is written": "the programming language/the language of the code/which language Cairn is written in/the language it is coded in"
    "||Cairn is written in Python/it is written in C++/the code is Python/Cairn is coded in Java",
    "I am the small demo": "who you are/your name/what you are/which model you are/what kind of model this is||you are a person/you are a robot"
    "/you are an AI/you are GPT",
    "I have about": "your size/how big you are/how many parameters you have/your number of parameters/the size of this model"
    "||you are big/you are small/this model is large",
    "I can remember": "what you can do/your abilities/what you are good at/how you can help/the things you can do/what I can ask you"
    "|ask you things/talk with you|you can help me",
    "No. I am a tiny": "whether you are good/how good you are/how smart you are/the quality of this model"
    "|use you at work/use this model for real work/trust you/rely on this model/use you for serious tasks"
    "|you are smart/you are clever/this model is good/you are reliable",
    "Cairn runs on your": "privacy/where my data goes/who sees my text/the privacy of my data|keep my data private/use Cairn offline"
    "|my data is private/my prompts are uploaded/my text leaves my computer/Cairn sends data to the cloud/my text goes to a server",
    "I was trained": "your training/how you were trained/your training data/what you learned from/where you come from||you were trained on books"
    "/you learned from the internet",
    "Cairn is built to load": "the model formats/the supported models/which models work/which formats can be read/the file formats"
    "|load a GGUF file/load my own model/use safetensors/run a bigger model/load Llama/load a Hugging Face model"
    "|Cairn supports GGUF/Cairn reads safetensors/other models work/GGUF is supported",
}

NOUN_FRAMES = """Tell me about {}.|Explain {}.|Explain {} to me.|I want to know about {}.|Can you explain {}?|{}?|Describe {}.|
What about {}?|What can you say about {}?|Say something about {}.|I have a question about {}.|Could you explain {}?|
What do you know about {}?|Please describe {}.|Inform me about {}.|I would like to hear about {}.|Give me details on {}.""".replace(
    "\n", ""
)
PLAIN_FRAMES = "What is {}?|What's {}?|Tell me {}.|Do you know {}?|Please tell me {}.|Could you tell me {}?|I want to know {}.|Say {}.".split(
    "|"
)
CLAUSE_FRAMES = "Tell me {}.|Do you know {}?|Please tell me {}.|Could you tell me {}?|I want to know {}.|Can you say {}?|I wonder {}.|Explain {}."
HOW_FRAMES = """How do I {}?|How can I {}?|How would I {}?|How to {}?|What do I do to {}?|Show me how to {}.|I want to {}.|
I want to {}. How?|Tell me how to {}.|What is the way to {}?|Help me {}.|What must I do to {}?|How does one {}?""".replace(
    "\n", ""
)
CAN_FRAMES = """Can I {}?|Is it possible to {}?|Could I {}?|May I {}?|Am I able to {}?|Is there a way to {}?|Does Cairn let me {}?|
Does Cairn allow me to {}?|Will I be able to {}?|Should I {}?|Do I get to {}?|Can you {}?|What if I {}?|What happens when I {}?|
What happens if I {}?|If I {}, what happens?|What does it mean to {}?|Why would I {}?|What is it like to {}?""".replace(
    "\n", ""
)
SAY_FRAMES = """Is it true that {}?|{}, right?|I heard that {}.|Do you know if {}?|Tell me if {}.|I think {}.|Am I right that {}?|
Someone said {}. Is it so?|Would you say that {}?|So {}?|Do you think {}?|Can it be that {}?""".replace("\n", "")

SYNONYMS = """licence license|computer machine laptop|start launch run|answer reply output result|big large|lose forget|needed required
necessary|use work_with|server Cairn|context state|explain describe|which what|people users|fast quick|kind type sort|special unique
different|reach access contact|work function|store keep save|hardware machine|made built created|purpose point goal|text data
prompts input|several many multiple|crash crashes|clients programs apps|swap change switch|supports handles accepts|load read open"""
_SWAPS = {
    word: [other.replace("_", " ") for other in group.split() if other != word]
    for group in SYNONYMS.replace("\n", " ").split("|")
    for word in group.split()
}
_HELD_OUT = {"".join(filter(str.isalnum, text.lower())) for topic in TOPICS for text in topic.held_out}
_CLAUSES = ("who ", "what ", "which ", "how ", "why ", "where ", "whether ")


def wording(rng: random.Random, topic: Topic) -> str:
    """A way to ask for the topic that is not one of those held out for the evaluation."""
    while True:
        text = rng.choice(topic.asked) if rng.random() < 0.5 else _framed(rng, topic)
        if rng.random() < 0.35:
            text = _swapped(rng, text)
        if "".join(filter(str.isalnum, text.lower())) not in _HELD_OUT:
            return text


def _framed(rng: random.Random, topic: Topic) -> str:
    key = next(key for key in PARTS if topic.answer.startswith(key))
    nouns, verbs, sayings = (part.split("/") if part else [] for part in PARTS[key].split("|"))
    part, kind = rng.choice([(p, "n") for p in nouns] + [(p, "v") for p in verbs] + [(p, "s") for p in sayings])
    if kind == "v":
        how = topic.answer.startswith(("Run", "By default")) or rng.random() < 0.2
        frame = rng.choice((HOW_FRAMES if how else CAN_FRAMES).split("|"))
    elif kind == "s":
        frame = rng.choice(SAY_FRAMES.split("|"))
    elif part.startswith(_CLAUSES):
        frame = rng.choice(CLAUSE_FRAMES.split("|"))
    else:
        frame = rng.choice(NOUN_FRAMES.split("|") if rng.random() < 0.6 else PLAIN_FRAMES)
    text = frame.format(part)
    return text[0].upper() + text[1:]


def _swapped(rng: random.Random, text: str) -> str:
    """Replace a word by one of like meaning, or leave one out."""
    words = text.split(" ")
    spot = rng.randrange(len(words))
    bare = words[spot].rstrip("?.,").lower()
    if bare in _SWAPS:
        words[spot] = words[spot].lower().replace(bare, rng.choice(_SWAPS[bare]))
    elif len(words) > 4 and bare in ("the", "a", "an", "is", "do", "does", "exactly", "me", "i", "to", "it"):
        del words[spot]
    out = " ".join(words)
    return out[0].upper() + out[1:]
