"""Reader of YAML files that people write: plain values with limits, in one pass over the parser's events.

Values are those of JSON: texts, numbers, true, false, null, lists, and objects with texts as keys. `yes` and `on` are
true, `no` and `off` false. Everything else, such as dates and numbers in base 60, is text. Anchors, aliases and merge
keys are expanded, and count towards the limits as what they stand for.
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
"""Most bytes of a file."""
MAX_YAML_DEPTH = 64
"""Most levels of nested lists and objects."""
MAX_YAML_VALUES = 1 << 18
"""Most values of a file; those behind an alias count each time it is used."""
MAX_DIGITS = 400
"""Most characters of a number."""
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_SAID: dict[str, bool | None] = {"": None, "~": None, "null": None}
_SAID |= dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
_TAGS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map"))
_TEXT = "tag:yaml.org,2002:str"
_MERGE = "<<"


def load_yaml(path: Path) -> Any:
    """Return the plain values of a YAML file.

    Raises ConfigError, with line and column, for a file that cannot be read or exceeds a limit.
    """
    import yaml

    try:
        data = path.read_bytes()
        if len(data) > MAX_YAML:
            raise ConfigError(f"{path} has {len(data)} bytes; the limit is {MAX_YAML}")
        return _YamlReader(yaml.parse(data.decode(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))).document()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except yaml.MarkedYAMLError as error:
        problem = " ".join(filter(None, (error.problem, error.context)))[:300]
        where = f", {_mark(error.problem_mark)}" if error.problem_mark else ""
        raise ConfigError(f"{path}{where}: cannot be read as YAML: {problem}") from None
    except _BadYaml as error:
        raise ConfigError(f"{path}, {error.args[0]}: cannot be read as YAML: {error.args[1]}") from None
    except (yaml.YAMLError, UnicodeError, ValueError) as error:
        problem = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path} cannot be read as YAML: {problem}") from None


@contextlib.contextmanager
def checking(path: Path) -> Iterator[None]:
    """Add the line and column to errors raised inside that name a field of the YAML file."""
    try:
        yield
    except CairnError as error:
        if not error.field or not (where := place_of(path, error.field)):
            raise
        message = str(error).removeprefix(f"{path}: ")
        raise error.named(f"{path}, {where}: {message}", error.field) from None


def place_of(path: Path, field: str) -> str:
    """Return the place of a field such as `nodes[2].prompt`, as `line 3, column 5`; "" if it is not found.

    A part of a field is a key, an index of a list, or the `id` or `name` of an object. Where a part is missing, the
    place of the part before it is returned.
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
    """Return the start mark and the node of a node's part, or None."""
    kind = type(node).__name__
    if kind == "MappingNode":
        return next(((key.start_mark, value) for key, value in node.value if key.value == part), None)
    if kind == "SequenceNode":
        if part.isdigit() and int(part) < len(node.value):
            return node.value[int(part)].start_mark, node.value[int(part)]
        return next(((item.start_mark, item) for item in node.value if _is_called(item, part)), None)
    return None


def _named(root: Any, name: str) -> tuple[Any, Any] | None:
    """Return the start mark and the node of the object with this `id` or `name`, at any depth, or None."""
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
    """The place and the reason why a file cannot be read."""


class _OpenNode:
    """A list or an object that is still being read."""

    def __init__(self, value: list[Any] | dict[str, Any], anchor: str | None, before: int) -> None:
        self.value, self.anchor = value, anchor
        self.before = before
        """The count of values before it."""
        self.key: str | None = None
        """The key whose value comes next, in an object."""
        self.merged: dict[str, Any] = {}
        """Members from merge keys; its own members take precedence."""


class _YamlReader:
    """Builder of values from the parser's events, without recursion."""

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        self._open: list[_OpenNode] = []
        self._anchors: dict[str, tuple[Any, int]] = {}
        """Anchored values by name, each with the count of values in it."""
        self._count = 0
        self._mark: Any = None

    def document(self) -> Any:
        """Return the value of the file's only document; None for an empty file."""
        root: list[Any] = []
        documents = 0
        for event in self._events:
            self._mark = event.start_mark
            kind = type(event).__name__
            documents += kind == "DocumentStartEvent"
            if documents > 1:
                raise self._bad("there is a second document; a file may have one")
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
                    raise self._bad(f"the alias {event.anchor[:32]} is not defined, or refers to itself")
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
        """Add a value to the innermost open list or object, or to `root`."""
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
                raise self._bad(f"the key {value[:40]!r} is there twice")
            holder.key = value
        else:
            key, holder.key = holder.key, None
            if key == _MERGE:
                self._merge(holder.merged, value)
            else:
                holder.value[key] = value

    def _merge(self, target: dict[str, Any], value: Any) -> None:
        """Merge the members of an object, or of a list of objects, into `target`; the first of a name wins."""
        for source in value if isinstance(value, list) else [value]:
            if not isinstance(source, dict):
                raise self._bad("the value of << must be an object, or a list of objects")
            self._add(len(source))
            for key, item in source.items():
                target.setdefault(key, item)

    def _at_key(self) -> bool:
        return bool(self._open) and isinstance(self._open[-1].value, dict) and self._open[-1].key is None

    def _is_plain(self, event: Any) -> bool:
        """Return whether a scalar may be something other than text: it has no quotes and no text tag."""
        self._check_tag(event.tag)
        return not event.style if event.tag is None else event.tag in _TAGS - {_TEXT}

    def _check_tag(self, tag: str | None) -> None:
        if tag is not None and tag not in _TAGS and tag != "!":
            raise self._bad(f"the tag {tag[:64]} is not supported")

    def _scalar(self, text: str) -> Any:
        """Return the value of a scalar without quotes."""
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
