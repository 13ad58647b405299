"""Types of a workflow as files and requests spell it. Only shapes are checked here; `checks` does the rest."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from cairn.config.option import closest
from cairn.types.errors import InvalidRequest, parted

MAX_NODES = 256
"""Nodes of one workflow, those of loops included."""
MAX_ITEMS = 256
"""Items of one fan-out."""
MAX_LOOP = 32
"""Iterations of a loop."""
MAX_RETRIES = 8
NODE_TOKENS = 1_024
"""Default `max_tokens` of a node's answer."""
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
"""Sampling options that a node may set."""

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}\Z")]


class _Form(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    pass


class Condition(_Form, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A condition on an output: exactly one comparison, or `all` or `any` of several conditions."""

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
    """A fan-out: the node runs once for each item of a list, in parallel."""

    items: str = msgspec.field(name="in")
    """The path of the list."""
    limit: int = MAX_ITEMS
    """A longer list fails the node."""


class Loop(_Form, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Nodes that are repeated until a condition holds, at most `limit` times."""

    nodes: tuple[Node, ...]
    limit: int
    until: Condition | None = None
    """Evaluated after every iteration."""


class Node(_Form, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A prompt and the contract of its answer, or a loop of nodes."""

    id: Name
    role: str = ""
    """Its role: a name in `roles`, or any other."""
    prompt: str = ""
    """A template: `{{ plan.steps }}` stands for a value, `{{ fix.code or code.code }}` for the first that is there."""
    needs: tuple[str, ...] = ()
    """Nodes to wait for, besides those that the prompt and the conditions read."""
    output: dict[str, Any] | None = None
    """The contract: a JSON schema that the answer fits. Without one the answer is a text."""
    takes: dict[str, str] = {}
    """Types it expects at paths of other nodes' outputs."""
    when: Condition | None = None
    """The node is skipped unless this holds."""
    each: Each | None = None
    loop: Loop | None = None
    retries: int = 2
    """Number of retries after an answer that breaks the contract."""
    sampling: dict[str, Any] = {}


class Merge(_Form, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Merges these nodes' output fields into the run's result; where they differ the earlier node wins."""

    precedence: tuple[str, ...]


class Workflow(_Form, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A graph of nodes."""

    name: str = ""
    system: str = ""
    """System text shared by all nodes."""
    roles: dict[str, str] = {}
    """System text of each role."""
    inputs: dict[str, Any] = {}
    """Names of inputs and their defaults; null for an input without one."""
    nodes: tuple[Node, ...]
    merge: Merge | None = None
    at_once: int = 16
    """Nodes and fan-out items that run in parallel."""


def workflow_of(given: Any) -> Workflow:
    """Convert plain values to a workflow. Raise InvalidRequest, naming the field, if their shape is wrong."""
    try:
        return msgspec.convert(given, type=Workflow)
    except msgspec.ValidationError as error:
        said, where, field = parted(error)
        near = "" if where or "unknown field" not in said else closest(field or "", Workflow.__struct_fields__)
        raise InvalidRequest(f"workflow{'.' + where if where else ''}: {said[:300]}{near}", field=field) from None
