"""Files of YAML that people write: plain values, read in one pass from the events of the parser.

Texts, numbers, true and false, null, lists and objects with texts as keys, as JSON has them; `yes` and `on` are true,
`no` and `off` false. All else - dates, numbers in base 60 - is text. Anchors, aliases and merge keys count as what they
stand for.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cairn.types.errors import CairnError, ConfigError

MAX_YAML = 1 << 22
"""Bytes of a file."""
MAX_YAML_DEPTH = 64
"""Lists and objects within each other."""
MAX_YAML_VALUES = 1 << 18
"""Values of a file, those of an alias once for each time that it stands there."""
MAX_DIGITS = 400
"""Characters of a number."""
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_SAID: dict[str, bool | None] = {"": None, "~": None, "null": None}
_SAID |= dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map"))
_TEXT = "tag:yaml.org,2002:str"
_MERGE = "<<"


def load_yaml(path: Path) -> Any:
    """Return the plain values of a YAML file. Raise ConfigError for one that cannot be read, or is beyond a limit; it
    says at which line and column."""
    import yaml

    try:
        data = path.read_bytes()
        if len(data) > MAX_YAML:
            raise ConfigError(f"{path} has {len(data)} bytes; the limit is {MAX_YAML}")
        return _YamlReader(yaml.parse(data.decode(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))).document()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except yaml.MarkedYAMLError as error:
        said = " ".join(filter(None, (error.problem, error.context)))[:300]
        where = f", {_mark(error.problem_mark)}" if error.problem_mark else ""
        raise ConfigError(f"{path}{where}: is no YAML that can be read: {said}") from None
    except _BadYaml as error:
        raise ConfigError(f"{path}, {error.args[0]}: is no YAML that can be read: {error.args[1]}") from None
    except (yaml.YAMLError, UnicodeError, ValueError) as error:
        said = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path} is no YAML that can be read: {said}") from None


@contextlib.contextmanager
def checking(path: Path) -> Iterator[None]:
    """Inside, errors that name a field of a YAML file say at which line and column it stands."""
    try:
        yield
    except CairnError as error:
        if not error.field or not (where := place_of(path, error.field)):
            raise
        said = str(error).removeprefix(f"{path}: ")
        raise error.named(f"{path}, {where}: {said}", error.field) from None


def place_of(path: Path, field: str) -> str:
    """Return `line 3, column 5` of what a field such as `nodes[2].prompt` names, as far as it is there.

    A part is a key, a number in a list, or the `id` or `name` of an object. Empty where nothing is found.
    """
    import yaml

    try:
        root = yaml.compose(path.read_bytes().decode(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, yaml.YAMLError, UnicodeError):
        return ""
    mark, node = None, root
    for part in re.findall(r"[^.\[\]$]+", field):
        found = _child(node, part) or (_named(root, part) if node is root else None)
        if found is None:
            break
        mark, node = found
    return _mark(mark) if mark else ""


def _child(node: Any, part: str) -> tuple[Any, Any] | None:
    """Return where a part of a node begins, and its node."""
    kind = type(node).__name__
    if kind == "MappingNode":
        return next(((key.start_mark, value) for key, value in node.value if key.value == part), None)
    if kind == "SequenceNode":
        if part.isdigit() and int(part) < len(node.value):
            return node.value[int(part)].start_mark, node.value[int(part)]
        return next(((item.start_mark, item) for item in node.value if _is_called(item, part)), None)
    return None


def _named(root: Any, name: str) -> tuple[Any, Any] | None:
    """Return the object with this `id` or `name`, wherever it is."""
    todo, seen = [root], set()
    while todo:
        node = todo.pop(0)
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if _is_called(node, name):
            return node.start_mark, node
        if type(node).__name__ == "MappingNode":
            todo += [value for _, value in node.value]
        elif type(node).__name__ == "SequenceNode":
            todo += node.value
    return None


def _is_called(node: Any, name: str) -> bool:
    pairs = node.value if type(node).__name__ == "MappingNode" else ()
    return any(key.value in ("id", "name") and value.value == name for key, value in pairs)


def _mark(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


class _BadYaml(Exception):
    """Where and why a file cannot be read."""


class _OpenNode:
    """A list or an object whose end has not come."""

    def __init__(self, value: list[Any] | dict[str, Any], anchor: str | None, before: int) -> None:
        self.value, self.anchor = value, anchor
        self.before = before
        """Values that were counted before it."""
        self.key: str | None = None
        """The key of an object whose value comes next."""
        self.merged: dict[str, Any] = {}
        """Members that it has unless it says others itself."""


class _YamlReader:
    """Makes values of events, without recursion."""

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        self._open: list[_OpenNode] = []
        self._anchors: dict[str, tuple[Any, int]] = {}
        """Values by the anchors before them, each with how many values it holds."""
        self._count = 0
        self._mark: Any = None

    def document(self) -> Any:
        """Return the value of the only document; None of an empty file."""
        root: list[Any] = []
        documents = 0
        for event in self._events:
            self._mark = event.start_mark
            kind = type(event).__name__
            documents += kind == "DocumentStartEvent"
            if documents > 1:
                raise self._bad("there is a second document; a file holds one")
            if (found := self._read(kind, event)) is not _NOTHING:
                self._put(found, root)
        return root[0] if root else None

    def _read(self, kind: str, event: Any) -> Any:
        """Return the value that an event completes, or _NOTHING."""
        match kind:
            case "ScalarEvent":
                self._add(1)
                value = event.value if self._at_key() or not self._is_plain(event) else self._scalar(event.value)
                self._remember(event.anchor, value, 1)
                return value
            case "AliasEvent":
                if event.anchor not in self._anchors:
                    raise self._bad(f"the alias {event.anchor[:32]} stands for nothing, or for what it is in")
                value, size = self._anchors[event.anchor]
                self._add(size)
                return value
            case "SequenceStartEvent" | "MappingStartEvent":
                self._begin(event, [] if kind[0] == "S" else {})
            case "SequenceEndEvent" | "MappingEndEvent":
                done = self._open.pop()
                if isinstance(done.value, dict):
                    for key, item in done.merged.items():
                        done.value.setdefault(key, item)
                self._remember(done.anchor, done.value, self._count - done.before)
                return done.value
        return _NOTHING

    def _begin(self, event: Any, value: list[Any] | dict[str, Any]) -> None:
        if self._at_key():
            raise self._bad("a key must be a text")
        self._check_tag(event.tag)
        if len(self._open) == MAX_YAML_DEPTH:
            raise self._bad(f"it is nested deeper than {MAX_YAML_DEPTH} levels, the limit")
        self._open.append(_OpenNode(value, event.anchor, self._count))
        self._add(1)

    def _put(self, value: Any, root: list[Any]) -> None:
        """Put a value where it belongs."""
        if not self._open:
            root.append(value)
            return
        holder = self._open[-1]
        if isinstance(holder.value, list):
            holder.value.append(value)
        elif holder.key is None:
            if not isinstance(value, str):
                raise self._bad("a key must be a text")
            if value in holder.value:
                raise self._bad(f"the key {value[:40]!r} stands there twice")
            holder.key = value
        else:
            key, holder.key = holder.key, None
            if key == _MERGE:
                self._merge(holder.merged, value)
            else:
                holder.value[key] = value

    def _merge(self, target: dict[str, Any], value: Any) -> None:
        """Take over the members of an object, or of each in a list, of several with one name the first."""
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict):
                raise self._bad("what is merged by << must be an object, or a list of them")
            self._add(len(one))
            for key, item in one.items():
                target.setdefault(key, item)

    def _at_key(self) -> bool:
        return bool(self._open) and isinstance(self._open[-1].value, dict) and self._open[-1].key is None

    def _is_plain(self, event: Any) -> bool:
        """Return whether a scalar may be something else than a text."""
        self._check_tag(event.tag)
        return not event.style if event.tag is None else event.tag in _TAGS - {_TEXT}

    def _check_tag(self, tag: str | None) -> None:
        if tag is not None and tag not in _TAGS and tag != "!":
            raise self._bad(f"the tag {tag[:64]} is not read here")

    def _scalar(self, text: str) -> Any:
        """Return what a scalar without quotes says."""
        word = text.lower() if len(text) <= 5 else text
        if word in _SAID:
            return _SAID[word]
        pattern = _INTEGER if text[-1:].isdigit() and _INTEGER.fullmatch(text) else _FLOAT
        if not pattern.fullmatch(text):
            return int(text, 16) if len(text) <= MAX_DIGITS and _HEX.fullmatch(text) else text
        if len(text) > MAX_DIGITS:
            raise self._bad(f"a number has {len(text)} characters; the limit is {MAX_DIGITS}")
        number = int(text) if pattern is _INTEGER else float(text)
        if number in (math.inf, -math.inf):
            raise self._bad(f"the number {text[:40]} is beyond the range of a 64-bit float")
        return number

    def _remember(self, anchor: str | None, value: Any, size: int) -> None:
        if anchor is not None:
            self._anchors[anchor] = value, size

    def _add(self, size: int) -> None:
        self._count += size
        if self._count > MAX_YAML_VALUES:
            raise self._bad(f"it holds more than {MAX_YAML_VALUES} values, the limit")

    def _bad(self, why: str) -> _BadYaml:
        return _BadYaml(_mark(self._mark), why)


_NOTHING = object()
