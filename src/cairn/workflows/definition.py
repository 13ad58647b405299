"""What a workflow is, as a file or a request says it. Nothing here is checked beyond its shape: see `checks`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from cairn.types.errors import InvalidRequest

MAX_NODES = 256
"""Nodes of one workflow, those of loops included."""
MAX_ITEMS = 256
"""Items over which a node fans out."""
MAX_LOOP = 32
"""Times that a loop runs."""
MAX_RETRIES = 8
NODE_TOKENS = 1_024
"""Tokens of an answer at most where its node says nothing of it."""
MAX_TEXT = 1 << 18
"""Characters of a prompt, the system text and the text of a role, each."""
MAX_FILLED = 1 << 20
"""Characters of a prompt once its slots are filled."""
MAX_SLOTS = 64
"""Slots of one prompt."""
MAX_ALTERNATIVES = 8
"""Paths of one slot."""
MAX_PATH = 512
"""Characters of a path."""
MAX_NAME = 128
"""Characters of the name of a role, an input or a field of a contract."""
MAX_NAMES = 256
"""Roles, inputs, fields of one object of a contract, and what one node needs or takes."""
MAX_VALUES = 1_024
"""Values of an `enum` and of an `in`."""
MAX_CONDITIONS = 64
"""Conditions within one `when` or `until`."""

SAMPLING = frozenset(
    {
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "stop",
        "seed",
        "reasoning_budget",
    }
)
"""What a node may say of how its answer is sampled."""

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}\Z")]


class _Form(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    pass


class Condition(_Form, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What holds of an output: exactly one of the comparisons. Several conditions are said by `all` and `any`."""

    output: str = ""
    """The path of a value: a node, then names of fields and numbers of items."""
    equals: Any = msgspec.field(default=msgspec.UNSET, name="is")
    differs: Any = msgspec.field(default=msgspec.UNSET, name="is_not")
    one_of: list[Any] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="in")
    above: float | msgspec.UnsetType = msgspec.UNSET
    below: float | msgspec.UnsetType = msgspec.UNSET
    exists: bool | msgspec.UnsetType = msgspec.UNSET
    every: tuple[Condition, ...] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="all")
    some: tuple[Condition, ...] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="any")


class Each(_Form, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The node runs once for each item of a list, all at once."""

    items: str = msgspec.field(name="in")
    """The path of the list."""
    limit: int = MAX_ITEMS
    """A longer list fails the node."""


class Loop(_Form, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Nodes that run again until a condition holds, and a number of times at most."""

    nodes: tuple[Node, ...]
    limit: int
    until: Condition | None = None
    """Looked at after every run of the nodes."""


class Node(_Form, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One piece of work: a prompt and what its answer has to be, or a loop of such nodes."""

    id: Name
    role: str = ""
    """Who does it: a name of `roles`, or any other."""
    prompt: str = ""
    """A template: `{{ plan.steps }}` stands for a value, `{{ fix.code or code.code }}` for the first that is there."""
    needs: tuple[str, ...] = ()
    """Nodes that have to be done before, beside those that the prompt and the conditions name."""
    output: dict[str, Any] | None = None
    """The contract: a JSON schema that the answer fits. Without one the answer is a text."""
    takes: dict[str, str] = {}
    """What it relies on of others: a path, and the type that stands there."""
    when: Condition | None = None
    """It is skipped unless this holds."""
    each: Each | None = None
    loop: Loop | None = None
    retries: int = 2
    """How often an answer that breaks the contract is asked for again."""
    sampling: dict[str, Any] = {}


class Merge(_Form, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The result of the run: the fields of what these nodes put out, the first of them first where they differ."""

    precedence: tuple[str, ...]


class Workflow(_Form, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A graph of nodes."""

    name: str = ""
    system: str = ""
    """What every node is told first, whatever its role."""
    roles: dict[str, str] = {}
    """What a role is told."""
    inputs: dict[str, Any] = {}
    """What a run is given: names, and the default of each; null where there is none."""
    nodes: tuple[Node, ...]
    merge: Merge | None = None
    at_once: int = 16
    """Nodes, and items of a fan-out, that run at once."""


def workflow_of(given: Any) -> Workflow:
    """Return the workflow of plain values. Raise InvalidRequest where they have another shape."""
    try:
        return msgspec.convert(given, type=Workflow)
    except msgspec.ValidationError as error:
        said, _, where = str(error).rpartition(" - at ")  # a name that the client chose may hold these words too
        said, where = (said, where) if said else (where, "")
        field = where.strip("`").removeprefix("$").lstrip(".")[:200] or None
        raise InvalidRequest(f"workflow{'.' + field if field else ''}: {said[:300]}", field=field) from None
