"""A Lark grammar -> one regular expression for the same texts, if it has one.

A tool's input is written within a call: escaped in JSON, or between tags that it must not contain. The grammar of calls
(`call_grammar`) can express both for a pattern, but not for rules. A grammar without recursion is a pattern in which
each name stands for its body. Ignored text may come before every token and at the end.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping

MOST = 8192
"""Most characters of a pattern, which becomes part of the prompt."""
MOST_READ = 1 << 16
"""Most characters of a grammar."""
DEEPEST = 64
"""Most levels of nested brackets and names."""
_TOKEN = re.compile(
    r"""(?P<blank>[ \t\f]+|//[^\n]*)
    | (?P<line>\r?\n)
    | (?P<text>"(?:[^"\\\n]|\\.)+"i?)
    | (?P<regex>/(?![*?/])(?:[^/\\\n]|\\.)*/[ims]*)
    | (?P<range>\.\.)
    | (?P<alias>->[ \t]*[A-Za-z_][A-Za-z0-9_]*)
    | (?P<command>%(?:import|ignore|llguidance)\b)
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<number>[0-9]+)
    | (?P<sign>[:|()\[\]?!*+~.,{}])""",
    re.VERBOSE,
)
_NUMBER = r"(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
COMMON: Mapping[str, str] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "NUMBER": _NUMBER,
    "SIGNED_NUMBER": f"[+-]?{_NUMBER}",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
"""NAME of `%import common.NAME` -> pattern."""
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\f": r"\f"}
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|x([0-9A-Fa-f]{2})|(.))")
_SAID = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b", '"': '"', "\\": "\\", "/": "/"}
"""Letter of an escape in a literal -> its character."""

Token = tuple[str, str]
Make = Callable[[int], str]
"""A part of a rule: nesting depth -> its pattern."""


class NotRegular(ValueError):
    """A grammar has no pattern here; the message follows "it "."""


def pattern_of(grammar: str) -> str:
    """Return the pattern of the whole texts that `start` allows. Raises NotRegular."""
    if len(grammar) > MOST_READ:
        raise NotRegular(f"has more than {MOST_READ} characters")
    try:
        reader = _LarkReader(_tokens(grammar))
        reader.read()
        return reader.whole()
    except RecursionError:  # nested names with brackets in each
        raise NotRegular("is nested too deeply") from None


def _tokens(grammar: str) -> list[Token]:
    found: list[Token] = []
    at = 0
    while at < len(grammar):
        matched = _TOKEN.match(grammar, at)
        if matched is None:
            raise NotRegular(f"has {grammar[at : at + 16]!r}, which is not read here")
        kind, at = str(matched.lastgroup), matched.end()
        if kind != "blank":
            found.append((kind, matched.group()))
    return found


class _LarkReader:
    """Parser of statements, one per line; a line that begins with a bar continues the statement before it."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens, self._at, self._depth = tokens, 0, 0
        self._bodies: dict[str, Make] = {}
        self._known: dict[str, str] = {}
        self._within: list[str] = []
        self._ignored: list[Make] = []
        self._terminal = False
        """Whether the body of a token is being parsed."""

    # ------------------------------------------------------------------------------------------------- statements

    def read(self) -> None:
        while self._tokens[self._at :]:
            kind, text = self._take()
            if kind == "line" or (text in ("?", "!") and self._next()[0] == "name"):
                continue
            if kind == "command":
                self._command(text)
            elif kind == "name":
                self._define(text)
            else:
                raise NotRegular(f"has {text[:16]!r} where a rule begins")

    def whole(self) -> str:
        if "start" not in self._bodies:
            raise NotRegular("has no rule start")
        return _bounded(self._named("start", 0) + self._blanks(0))

    def _command(self, command: str) -> None:
        if command == "%ignore":
            self._terminal = True
            self._ignored.append(self._choice())
        elif command == "%import":
            self._import()
        elif self._take()[1] + self._take()[1] != "{}":
            raise NotRegular("has options of llguidance's own")

    def _import(self) -> None:
        if self._take() != ("name", "common"):
            raise NotRegular("imports what is not common")
        names = []
        if self._next() == ("sign", "("):
            while self._take()[1] != ")":
                names.append(self._take()[1])
        else:
            self._expect(".")
            names.append(self._take()[1])
        alias = self._take()[1][2:].strip() if self._next()[0] == "alias" else None
        for name in names:
            if name not in COMMON:
                raise NotRegular(f"imports common.{name[:32]}, which is not known here")
            self._known[alias or name] = COMMON[name]

    def _define(self, name: str) -> None:
        self._terminal = name.upper() == name
        if self._next() == ("sign", "."):  # a token's priority, which does not matter here
            self._at += 2
        self._expect(":")
        if name in self._bodies:
            raise NotRegular(f"says {name[:32]} twice")
        self._bodies[name] = self._choice()

    # ------------------------------------------------------------------------------------------------- expressions

    def _choice(self) -> Make:
        """Parse alternatives, also on the following lines."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise NotRegular("is nested too deeply")
        parts = [self._run()]
        while self._bar():
            parts.append(self._run())
        self._depth -= 1
        if len(parts) == 1:
            return parts[0]
        return lambda deep: _bounded("(?:" + "|".join(part(deep) for part in parts) + ")")

    def _bar(self) -> bool:
        at = self._at
        while self._next()[0] == "line":
            self._at += 1
        if self._next() == ("sign", "|"):
            self._at += 1
            return True
        self._at = at
        return False

    def _run(self) -> Make:
        """Parse a sequence up to the end of the line; within brackets it may span lines."""
        parts: list[Make] = []
        while True:
            kind, text = self._next()
            if kind == "alias" or (kind == "line" and self._depth > 1):
                self._at += 1
            elif kind in ("text", "regex", "name") or (kind == "sign" and text in "(["):
                parts.append(self._repeated(self._atom()))
            else:
                break
        return lambda deep: _bounded("".join(part(deep) for part in parts))

    def _atom(self) -> Make:
        kind, text = self._take()
        if kind == "sign":
            inner = self._choice()
            self._expect(")" if text == "(" else "]")
            return inner if text == "(" else lambda deep: f"(?:{inner(deep)})?"
        if kind == "name":
            return lambda deep: self._named(text, deep)
        if kind == "text" and self._next()[0] == "range":
            self._at += 1
            return self._token(f"[{_spelt(text)}-{_spelt(self._take()[1])}]")
        return self._token(_literal(text) if kind == "text" else _inner(text))

    def _token(self, pattern: str) -> Make:
        return (lambda deep: pattern) if self._terminal else (lambda deep: self._blanks(deep) + pattern)

    def _repeated(self, inner: Make) -> Make:
        kind, text = self._next()
        if kind != "sign" or text not in "?*+~{":
            return inner
        self._at += 1
        if text in "~{":
            text = self._times(text)
        return lambda deep: f"(?:{inner(deep)}){text}"

    def _times(self, opened: str) -> str:
        """Parse `~ 3`, `~ 3..5`, `{3}`, `{3,}` or `{3,5}` into a pattern's form."""
        least = self._take()[1]
        said = f"{{{least}}}"
        if self._next()[0] == "range" or self._next() == ("sign", ","):
            self._at += 1
            most = self._take()[1] if self._next()[0] == "number" else ""
            said = f"{{{least},{most}}}"
        if opened == "{":
            self._expect("}")
        return said

    # ------------------------------------------------------------------------------------------------- patterns

    def _named(self, name: str, deep: int) -> str:
        """Return the pattern of a rule or a token."""
        terminal = name.upper() == name
        if name not in self._known:
            self._known[name] = self._made(name, deep)
        blanks = self._blanks(deep) if terminal and not self._in_terminal() else ""
        return blanks + self._known[name]

    def _made(self, name: str, deep: int) -> str:
        if name not in self._bodies:
            raise NotRegular(f"does not say what {name[:32]} is")
        if name in self._within:
            raise NotRegular(f"comes back to its rule {name[:32]}")
        if deep > DEEPEST:
            raise NotRegular("is nested too deeply")
        self._within.append(name)
        made = self._bodies[name](deep + 1)
        self._within.pop()
        return f"(?:{made})"

    def _in_terminal(self) -> bool:
        return bool(self._within) and self._within[-1].upper() == self._within[-1]

    def _blanks(self, deep: int) -> str:
        """Return the pattern of ignored text before a token."""
        if not self._ignored:
            return ""
        self._within.append("%IGNORE")
        made = "|".join(one(deep + 1) for one in self._ignored)
        self._within.pop()
        return f"(?:{made})*"

    # ------------------------------------------------------------------------------------------------- tokens

    def _next(self) -> Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _take(self) -> Token:
        token = self._next()
        if self._at >= len(self._tokens):
            raise NotRegular("ends in the middle of a rule")
        self._at += 1
        return token

    def _expect(self, sign: str) -> None:
        kind, text = self._take()
        if (kind, text) != ("sign", sign):
            raise NotRegular(f"has {text[:16]!r} where {sign!r} is awaited")


def _bounded(pattern: str) -> str:
    if len(pattern) > MOST:
        raise NotRegular(f"makes a pattern of more than {MOST} characters")
    return pattern


def _said(text: str) -> str:
    """Return the text of a literal."""
    said = _ESCAPE.sub(_unescaped, text[1:-1])
    try:
        return said.encode("utf-16-le", "surrogatepass").decode("utf-16-le")  # joins surrogates
    except UnicodeDecodeError:
        raise NotRegular(f"has half a surrogate in {text[:16]!r}") from None


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    if code and int(code, 16) <= sys.maxunicode:
        return chr(int(code, 16))
    if code or found[4] not in _SAID:
        raise NotRegular(f"has the escape {found[0]!r}, which is not read here")
    return _SAID[found[4]]


def _literal(text: str) -> str:
    folded = text.endswith("i")
    said = "".join(map(_escaped, _said(text.removesuffix("i"))))
    return f"(?i:{said})" if folded else f"(?:{said})"


def _spelt(text: str) -> str:
    """Return the pattern of one end of a range."""
    said = _said(text)
    if len(said) != 1:
        raise NotRegular(f"has a range of {text[:16]}")
    return _escaped(said)


def _escaped(one: str) -> str:
    """Return the pattern of a character, also valid inside brackets."""
    if one < " " or one == "\x7f":
        return _ESCAPES.get(one, f"\\x{ord(one):02x}")
    return "\\" + one if one in r"\.^$|?*+-(){}[]" else one


def _inner(text: str) -> str:
    """Return the pattern between slashes, with its flags."""
    pattern, _, flags = text[1:].rpartition("/")
    return f"(?{flags}:{pattern})".replace(r"\/", "/") if flags else f"(?:{pattern})".replace(r"\/", "/")
