"""Questions about Cairn and about the demo model itself, with the answers it should give.

Each topic lists the wordings that training may use and, after ``held_out``, wordings that only the evaluation uses.
An answer counts when it contains every keyword of one of the alternatives (lower case).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topic:
    """One thing to know: how people ask for it, what to answer, and what shows that the answer is right."""

    answer: str
    keywords: tuple[str, ...]
    asked: tuple[str, ...]
    held_out: tuple[str, ...]


def _topic(answer: str, keywords: str, asked: str, held_out: str) -> Topic:
    lines = (tuple(line.strip() for line in text.strip().splitlines()) for text in (asked, held_out))
    return Topic(answer, tuple(keywords.split("|")), *lines)


TOPICS = (
    _topic(
        "Cairn is an LLM inference server in Python for people who run agents on their own machines.",
        "server",
        """What is Cairn?
        What's Cairn?
        Tell me about Cairn.
        Explain Cairn to me.
        What exactly is Cairn?
        Can you describe Cairn?
        Cairn - what is it?
        What does Cairn do?
        Describe Cairn in one sentence.
        I have never heard of Cairn. What is it?
        What kind of software is Cairn?
        What is this Cairn thing?
        What is the Cairn project about?
        Give me a short description of Cairn.
        So what is Cairn all about?
        What sort of program is Cairn?
        Introduce Cairn.
        What is Cairn good for?""",
        """Could you tell me what Cairn is?
        In a few words, what is Cairn?
        What type of tool is Cairn?
        Please give me an overview of Cairn.
        Someone mentioned Cairn to me, what's that?""",
    ),
    _topic(
        "Run `cairn serve`. It starts the server at http://127.0.0.1:8000/v1.",
        "cairn serve",
        """How do I start Cairn?
        How do I start the server?
        How do I run Cairn?
        How can I launch Cairn?
        What command starts Cairn?
        Which command starts the server?
        What do I type to start Cairn?
        How do I get Cairn running?
        How to start the Cairn server?
        How do I begin using Cairn?
        Show me how to start the server.
        What is the command to run the server?
        I want to start Cairn. What do I do?
        How do I launch the server?
        How is Cairn started?
        How do I serve a model?
        Start command for Cairn?""",
        """What should I run to bring Cairn up?
        How would I start up a Cairn server?
        Tell me the command that launches Cairn.
        How can I get the server started?
        What do I enter in the terminal to start the server?""",
    ),
    _topic(
        "Any OpenAI or Anthropic client works. Point it at http://127.0.0.1:8000/v1.",
        "openai|anthropic",
        """Which clients work with Cairn?
        What clients can I use with Cairn?
        How do I connect a client to Cairn?
        Does Cairn work with the OpenAI client?
        Can I use the OpenAI SDK with Cairn?
        Can I use the Anthropic client with Cairn?
        Does Cairn support the Anthropic API?
        Which APIs does Cairn speak?
        What API does Cairn offer?
        Is Cairn compatible with OpenAI?
        How do I talk to Cairn from my code?
        Which SDKs work with Cairn?
        Can my OpenAI code talk to Cairn?
        Is there an OpenAI compatible API?
        What can I connect to Cairn?
        How do I use Cairn with my client?""",
        """What client libraries does Cairn accept?
        Will my OpenAI program work with Cairn?
        Which API formats does Cairn support?
        Can I point an Anthropic SDK at Cairn?
        Which client programs does Cairn work with?""",
    ),
    _topic(
        "By default Cairn listens at http://127.0.0.1:8000/v1.",
        "127.0.0.1:8000",
        """What address does Cairn listen on?
        Which port does Cairn use?
        What is the default port?
        What is the default address of Cairn?
        What base URL do I use?
        What is the base URL?
        Where does Cairn listen?
        On which port does the server run?
        What URL is the server at?
        Where can I reach the server?
        What is Cairn's URL?
        Which address do I give to my client?
        What port is it on?
        What is the endpoint of the API?
        Where is the server reachable?""",
        """What is the port number of the Cairn server?
        Which URL should my client use for Cairn?
        At what address can I reach Cairn?
        Tell me the default URL of the server.
        What port does the Cairn server listen on?""",
    ),
    _topic(
        "A context computed once is never computed again: that is what Cairn is built for. It is kept across "
        "other agents' turns, restarts, crashes and model swaps.",
        "never computed again",
        """What makes Cairn special?
        Why should I use Cairn?
        What is the main idea of Cairn?
        What is the point of Cairn?
        What is different about Cairn?
        Why Cairn and not another server?
        What does Cairn promise?
        What is Cairn's main feature?
        What is the advantage of Cairn?
        Why is Cairn fast?
        How does Cairn save time?
        What is the big idea behind Cairn?
        What is the best thing about Cairn?
        What problem does Cairn solve?
        Why was Cairn built?
        How does Cairn avoid repeated work?
        What sets Cairn apart?""",
        """What is the key feature of Cairn?
        What is unique about Cairn?
        For what reason should I choose Cairn?
        Which problem is Cairn meant to solve?
        What can Cairn do that other servers cannot?""",
    ),
    _topic(
        "Cairn keeps contexts in a store. After a restart or a crash it reads them back and does not compute them again.",
        "restart|store",
        """What happens after a restart?
        What happens if the server crashes?
        What happens when Cairn crashes?
        Does a restart lose my context?
        Do I lose my agents when the server restarts?
        Is the context kept after a crash?
        Does Cairn survive a crash?
        Does the cache survive a restart?
        What if I restart Cairn?
        What if the power goes out?
        Will a crash destroy my context?
        Is anything lost on a restart?
        Can Cairn recover from a crash?
        Does the context survive when Cairn restarts?
        What happens to my context when the server stops?""",
        """Is my context safe if Cairn crashes?
        Will I lose the context after restarting the server?
        What does Cairn do after a crash?
        If I restart the server, is the context gone?
        Is everything lost when Cairn crashes?""",
    ),
    _topic(
        "Cairn needs no GPU. It runs on the CPU out of the box.",
        "cpu",
        """Do I need a GPU?
        Does Cairn need a GPU?
        Can Cairn run on a CPU?
        Does Cairn run on the CPU?
        Is a GPU required?
        Can I use Cairn without a GPU?
        Does it work on a CPU?
        What hardware does Cairn need?
        Does Cairn work on a laptop?
        Can I run Cairn on my laptop?
        Do I need a graphics card?
        Does it run without a graphics card?
        What hardware do I need?
        Is a CPU enough for Cairn?
        Which hardware does Cairn run on?""",
        """Must I have a GPU for Cairn?
        Will Cairn work on a machine with only a CPU?
        Can I run Cairn if I have no graphics card?
        Is it possible to run Cairn on a CPU?
        Will Cairn run on my laptop without a GPU?""",
    ),
    _topic(
        "No. Cairn needs no torch on the CPU.",
        "no torch",
        """Does Cairn need torch?
        Do I need PyTorch?
        Is torch required?
        Does Cairn depend on PyTorch?
        Do I have to install torch?
        Must I install PyTorch?
        Is PyTorch needed?
        Can I use Cairn without torch?
        Does Cairn use torch on the CPU?
        Does the CPU version need torch?
        Do I need torch for the CPU?
        Does it work without PyTorch?
        Is torch a dependency?""",
        """Should I install torch for Cairn?
        Is PyTorch required to use Cairn?
        Will Cairn run without torch installed?
        Does Cairn require PyTorch on a CPU?
        Is it necessary to install PyTorch first?""",
    ),
    _topic(
        "Cairn uses continuous batching over a paged KV cache: requests join and leave the batch at any step.",
        "batch",
        """How does Cairn batch requests?
        Does Cairn do continuous batching?
        Does Cairn support batching?
        What is continuous batching?
        How does Cairn handle many requests at once?
        Can Cairn serve many users at once?
        How are requests batched?
        Does Cairn batch?
        What kind of batching does Cairn use?
        Can it handle several requests at the same time?
        How does Cairn serve several agents at once?
        Can several agents run at the same time?
        How are parallel requests handled?
        Explain continuous batching.""",
        """Which batching method does Cairn use?
        Is there continuous batching in Cairn?
        Can Cairn deal with many requests together?
        How does the server batch several requests?
        How are many simultaneous requests batched?""",
    ),
    _topic(
        "Prefix caching reuses the part that requests have in common, so a shared start is computed once.",
        "prefix",
        """What is prefix caching?
        Does Cairn have prefix caching?
        How does prefix caching work?
        Explain prefix caching.
        Does Cairn cache prefixes?
        What does the prefix cache do?
        What is a prefix cache?
        Does Cairn reuse shared prompts?
        Is there prefix caching?
        Can Cairn share a system prompt between requests?
        What happens with prompts that start the same?
        How does Cairn reuse prompts?
        What is the prefix cache for?""",
        """Tell me how the prefix cache works.
        Is prefix caching supported by Cairn?
        What do you mean by prefix caching?
        Does Cairn reuse a shared prefix?
        What does prefix caching do for me?""",
    ),
    _topic(
        "The KV cache holds the keys and values of tokens already computed. In Cairn it is paged.",
        "keys and values",
        """What is the KV cache?
        What is a KV cache?
        Explain the KV cache.
        What is in the KV cache?
        What does the KV cache hold?
        What is a paged KV cache?
        Is the KV cache paged?
        What is the key-value cache?
        What does KV mean?
        What is the KV cache for?
        How does the KV cache work?
        Does Cairn use a paged KV cache?""",
        """Tell me about the KV cache.
        What does Cairn keep in its KV cache?
        Can you explain what a KV cache is?
        What is the KV cache used for in Cairn?""",
    ),
    _topic(
        "Cairn is built to give the same answer alone or in a batch, cached or cold.",
        "same answer",
        """Does caching change the answer?
        Does batching change the answer?
        Are the answers always the same?
        Is the answer the same with the cache?
        Is Cairn deterministic?
        Do I get the same answer twice?
        Does a batch change the result?
        Is the output the same in a batch?
        Are results reproducible?
        Will the cache change my results?
        Does Cairn give the same answer cached and cold?
        Can the cache make the answer different?
        Is the result the same alone and in a batch?
        Does Cairn always give the same answer?""",
        """Are Cairn's answers reproducible?
        Will batching give me a different answer?
        Can caching alter what the model says?
        Is a cached answer the same as a cold one?
        Will I get the same answer with and without the cache?""",
    ),
    _topic(
        "In Cairn an agent can be forked, rolled back, pinned and exported.",
        "forked|rolled back",
        """What can I do with an agent?
        What can agents do in Cairn?
        What can I do with agents in Cairn?
        Which agent operations are there?
        How does Cairn handle agents?
        What does Cairn offer for agents?
        Which agent features does Cairn have?
        Tell me about agents in Cairn.
        What are the operations on agents?
        Can agents be managed in Cairn?
        Can I fork and export agents?
        How do I manage agents?""",
        """Which things can be done with an agent in Cairn?
        What agent functions does Cairn have?
        List what I can do with an agent.
        What operations on agents are there in Cairn?""",
    ),
    _topic(
        "Forking makes a second agent that goes on from the same context.",
        "second agent",
        """What is forking?
        What does fork mean?
        What does it mean to fork an agent?
        What happens when I fork an agent?
        Can I fork an agent?
        Explain forking an agent.
        How does forking work?
        What is a fork in Cairn?
        What does forking an agent do?
        Why would I fork an agent?
        Can I copy an agent?
        Can I make a copy of an agent?""",
        """What do you get when you fork an agent?
        Tell me what forking an agent means.
        Is it possible to fork an agent?
        What does the fork operation do with an agent?""",
    ),
    _topic(
        "Rolling back takes an agent to an earlier turn.",
        "earlier turn",
        """What is rollback?
        What does rolling back mean?
        Can I roll back an agent?
        What happens when I roll back an agent?
        How do I undo a turn?
        Can I undo a turn?
        Explain rolling back.
        What does rollback do?
        Can an agent go back to an earlier state?
        How does rollback work?
        What is rolling back an agent?
        Can I take back the last turn?""",
        """What does it mean to roll an agent back?
        Is it possible to roll back an agent?
        Tell me what rollback does.
        How can I go back to an earlier turn of an agent?""",
    ),
    _topic(
        "Pinning keeps an agent's context from being evicted.",
        "evicted",
        """What is pinning?
        What does pinning do?
        What does it mean to pin an agent?
        Can I pin an agent?
        Why would I pin an agent?
        What happens when I pin an agent?
        Explain pinning.
        What is a pinned agent?
        How does pinning work?
        How do I keep an agent in memory?
        What does pin mean?""",
        """What do you mean by pinning an agent?
        Tell me what pinning an agent does.
        What is the use of pinning an agent?
        What does it do when I pin an agent?""",
    ),
    _topic(
        "Exporting writes an agent out so that it can move to another machine.",
        "another machine",
        """What is exporting?
        What does export do?
        Can I export an agent?
        What does it mean to export an agent?
        Can I move an agent to another machine?
        How do I move an agent to another computer?
        Explain exporting an agent.
        What happens when I export an agent?
        Why would I export an agent?
        Can an agent be moved?
        How does export work?""",
        """Tell me what exporting an agent does.
        Is it possible to export an agent?
        How can I take an agent to a different computer?
        How do I export an agent to another computer?""",
    ),
    _topic(
        "When you swap the model, Cairn keeps the stored contexts, so they are there when the model comes back.",
        "swap|contexts",
        """What happens when I swap the model?
        Can I swap the model?
        What happens on a model swap?
        Can I change the model?
        What if I switch to another model?
        What happens when I change models?
        Does a model swap lose the context?
        Is the context lost when I switch models?
        How do I swap models?
        What happens to my context when I change the model?
        Does Cairn support model swaps?
        Can I switch models?""",
        """If I swap models, what happens to the context?
        Is it possible to swap the model in Cairn?
        Will a model swap throw away my context?
        What happens to stored contexts if I change the model?""",
    ),
    _topic(
        "Cairn is under the Apache-2.0 licence, so it is free and open source.",
        "apache",
        """What licence is Cairn under?
        Which license does Cairn use?
        Is Cairn open source?
        Is Cairn free?
        What is the license?
        How is Cairn licensed?
        Can I use Cairn for free?
        How much does Cairn cost?
        Do I have to pay for Cairn?
        What does Cairn cost?
        Is it open source?
        Can I use Cairn at work?
        Under which licence is it released?
        Is it free to use?""",
        """What is the licence of Cairn?
        Is Cairn free software?
        Does Cairn cost anything?
        Tell me Cairn's license.
        Under what license is Cairn published?""",
    ),
    _topic(
        "A cairn is a pile of stones that marks a path.",
        "stones",
        """What is a cairn?
        What does the word cairn mean?
        What does cairn mean?
        Why is it called Cairn?
        Where does the name Cairn come from?
        What does the name mean?
        Why the name Cairn?
        What is the meaning of the word cairn?
        Define cairn.
        What does the name Cairn stand for?
        Explain the name Cairn.
        What are cairns?
        What is a cairn in the mountains?""",
        """What is the origin of the name Cairn?
        Tell me the meaning of the word cairn.
        Why did they name it Cairn?
        What does the word 'cairn' mean in English?""",
    ),
    _topic(
        "Cairn is for people who run agents on their own machines.",
        "agents|own machines",
        """Who is Cairn for?
        Who should use Cairn?
        Who uses Cairn?
        For whom is Cairn made?
        Who is it made for?
        What users is Cairn meant for?
        Is Cairn for me?
        Who is the audience of Cairn?
        Who was Cairn built for?
        What people is Cairn for?
        Who would want Cairn?""",
        """Which people is Cairn meant for?
        Who is supposed to use Cairn?
        For which users was Cairn made?
        Who are the intended users of Cairn?""",
    ),
    _topic(
        "Cairn is written in Python.",
        "python",
        """What language is Cairn written in?
        Which programming language is Cairn in?
        Is Cairn written in Python?
        What is Cairn written in?
        What is Cairn made with?
        In which language was Cairn programmed?
        Is Cairn a Python program?
        What programming language does Cairn use?
        Is it written in Rust?
        Is Cairn written in C++?
        Which language was used to write Cairn?""",
        """Tell me the programming language of Cairn.
        In what language is Cairn coded?
        What language did they use to build Cairn?
        In which programming language did they write Cairn?""",
    ),
    _topic(
        "I am the small demo model that comes with Cairn.",
        "demo model",
        """Who are you?
        What are you?
        What is your name?
        What's your name?
        Are you a human?
        Are you ChatGPT?
        Are you a real person?
        Introduce yourself.
        Tell me about yourself.
        Which model are you?
        What model is this?
        What kind of model are you?
        Are you an AI?
        Who am I talking to?
        What should I call you?
        Do you have a name?
        Who is this?""",
        """Which model am I talking to?
        Please introduce yourself.
        What kind of AI are you?
        Can you tell me who you are?
        Hi, who are you exactly?""",
    ),
    _topic(
        "I have about 4.7 million parameters, so I know very little.",
        "million",
        """How big are you?
        How many parameters do you have?
        What size are you?
        How large is this model?
        How many weights do you have?
        What is your size?
        How small are you?
        Are you a big model?
        Are you a large language model?
        How big is this model?
        What is your parameter count?
        How many parameters does this model have?""",
        """How large are you?
        Tell me how many parameters you have.
        What is the number of your parameters?
        How many parameters does this model contain?""",
    ),
    _topic(
        "I can remember what you tell me, do small sums, call tools and answer questions about Cairn.",
        "sums|tools",
        """What can you do?
        What are you able to do?
        How can you help me?
        What can I ask you?
        What are your skills?
        What are you good at?
        Can you help me?
        What do you know?
        What can you help me with?
        What things can you do?
        Help.
        Tell me what you can do.
        What should I ask you?
        What are you for?""",
        """Which things are you able to do?
        What kinds of questions can I ask you?
        What could you help me with?
        Tell me, what are you capable of?""",
    ),
    _topic(
        "No. I am a tiny model for trying Cairn out. Load a bigger model for real work.",
        "bigger model",
        """Can I use you for real work?
        Are you smart?
        Are you good enough for my job?
        Should I use you in production?
        Can you replace a big model?
        Can you write my thesis?
        Can you write code for me?
        Are you as good as a big model?
        Can I rely on you?
        Can I trust your answers?
        Are you intelligent?
        Are you useful for real tasks?
        Is this model any good?
        Can you write a program?""",
        """Would you use this model for serious work?
        Can I use this model in production?
        Are you clever?
        Are you good enough for serious work?""",
    ),
    _topic(
        "Cairn runs on your own machine, so your text stays there.",
        "stays",
        """Is my data private?
        Where does my data go?
        Does Cairn send my data anywhere?
        Is Cairn private?
        Does my text leave my machine?
        Who can see my text?
        Does Cairn upload my prompts?
        Is my data sent to the cloud?
        Does Cairn work offline?
        Is anything sent to the internet?
        Is my text safe?
        Does Cairn need the cloud?""",
        """Are my prompts kept private?
        Does anything I type leave my computer?
        Is my text sent to the cloud?
        Does my data stay on my machine with Cairn?""",
    ),
    _topic(
        "I was trained from scratch on text that a program in the Cairn repository writes.",
        "trained",
        """How were you trained?
        What were you trained on?
        What is your training data?
        Who trained you?
        Where does your training text come from?
        Which data were you trained on?
        How did you learn?
        Were you trained on the internet?
        Who made you?
        How were you made?
        Who created you?
        Where do you come from?""",
        """Tell me how you were trained.
        What text did you learn from?
        Which training data was used for you?
        What data were you trained with?""",
    ),
    _topic(
        "Cairn is built to load models in the Hugging Face layout (safetensors) and GGUF files.",
        "safetensors|gguf",
        """Which models can Cairn load?
        What models does Cairn support?
        What model formats does Cairn read?
        Can Cairn load GGUF files?
        Does Cairn read safetensors?
        Can I load my own model?
        How do I use a bigger model?
        Which model files work with Cairn?
        Does Cairn support Hugging Face models?
        Can I use a Qwen model with Cairn?
        Can I run Llama with Cairn?
        What file formats does Cairn support?
        Which models can I run?""",
        """What kinds of models can I load into Cairn?
        Is GGUF supported by Cairn?
        Which file formats can Cairn load?
        Can I load a GGUF model with Cairn?""",
    ),
)
