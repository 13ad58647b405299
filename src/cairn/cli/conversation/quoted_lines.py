'''Questions of several lines: `"""` around them, or a backslash at the end of a line.'''

from __future__ import annotations

QUOTES = '"""'


def unfinished(text: str) -> bool:
    """Return whether the text continues on the next line."""
    return text.endswith("\\") or _quoted(text)


def _quoted(text: str) -> bool:
    """Return whether triple quotes are open; only quotes at the start of a question or in a command count."""
    start = text.lstrip()
    return (start.startswith(QUOTES) or start.startswith("/")) and text.count(QUOTES) % 2 == 1


def question_of(text: str) -> str:
    """Return the question without the triple quotes around it and the backslashes that join its lines."""
    stripped = text.strip()
    if stripped.startswith(QUOTES) and stripped.endswith(QUOTES) and len(stripped) >= 2 * len(QUOTES):
        return unquoted(stripped)
    return text.replace("\\\n", "\n")


def unquoted(text: str) -> str:
    """Return a command's argument without the quotes around it."""
    for quotes in (QUOTES, '"', "'"):
        if text.startswith(quotes) and text.endswith(quotes) and len(text) >= 2 * len(quotes):
            return text[len(quotes) : -len(quotes)].strip("\n")
    return text
