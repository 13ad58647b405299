'''How several typed lines become one question: `"""` around them, or a backslash at the end of a line.'''

from __future__ import annotations

QUOTES = '"""'


def unfinished(text: str) -> bool:
    """Return whether what was typed so far goes on in the next line."""
    return text.endswith("\\") or _quoted(text)


def _quoted(text: str) -> bool:
    """Whether triple quotes were opened and not closed. Only those at the start of a question or a command open any."""
    start = text.lstrip()
    return (start.startswith(QUOTES) or start.startswith("/")) and text.count(QUOTES) % 2 == 1


def question_of(text: str) -> str:
    """Return the question without the triple quotes around it, and without backslashes that joined its lines."""
    stripped = text.strip()
    if stripped.startswith(QUOTES) and stripped.endswith(QUOTES) and len(stripped) >= 2 * len(QUOTES):
        return unquoted(stripped)
    return text.replace("\\\n", "\n")


def unquoted(text: str) -> str:
    """Return the argument of a command without quotes around it."""
    for quotes in (QUOTES, '"', "'"):
        if text.startswith(quotes) and text.endswith(quotes) and len(text) >= 2 * len(quotes):
            return text[len(quotes) : -len(quotes)].strip("\n")
    return text
