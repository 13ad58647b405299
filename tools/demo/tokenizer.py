"""The demo model's tokenizer: byte-level BPE whose splits do not depend on what stands before a word.

A model this small copies a name well only if the name is cut into the same pieces after a space and after a quote.
So a space is a piece of its own, except before a closed list of little words ("the", "what", ...) that are never
copied; digits stand alone; and the punctuation between JSON values forms pieces that touch no value.
"""

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 2048
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")

GLUE = """a about after again all also am an and any are as ask at be been but by can computed could did do does done for
from get give had has have he her here him his how if in into is it its just know let like make me more my need never
new no not now of off on one only or other our out over own please run same say she should so some tell than that the
their them then there they this to told too up us use using want was way we were what when where which who why will with
would you your called name named
""".split()

JSON_MARKS = (
    '{"',
    '": "',
    '": ',
    '": {"',
    '": ["',
    '", "',
    '"}',
    '"}}',
    "}}",
    '": {',
    '"]',
    '"}, "',
    '}, "',
    '"]}',
    '"]}}',
    ', "',
)


def _pattern() -> str:
    marks = sorted(JSON_MARKS, key=len, reverse=True)
    escaped = "|".join("".join("\\" + c if c in '{}[]",:' else c for c in mark) for mark in marks)
    glue = "|".join(sorted(GLUE, key=len, reverse=True))
    words = r"\p{Lu}?\p{Ll}+|\p{Lu}+(?!\p{Ll})|\p{L}|\p{M}"
    return rf" (?:{glue})(?![\p{{L}}\p{{N}}_])|{escaped}|{words}|\p{{N}}|\s|[^\s\p{{L}}\p{{N}}]"


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from training text; the same text gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_pattern()), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t in (END_OF_TEXT, TURN_START, TURN_END)]
    marks = [AddedToken(t, special=False, normalized=False) for t in MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(marks),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    tokenizer.add_tokens(marks)
    return tokenizer
