"""Resolution of references within a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def resolved(root: Any, reference: str) -> Any:
    """Return the schema in `root` that a reference points to; True for an anchor, None if there is none."""
    if reference in ("#", "#/"):
        return root
    if not reference.startswith("#/"):
        return True  # an anchor, which llguidance looks up
    found = root
    for part in reference[2:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~").replace("%25", "%")
        if isinstance(found, list) and part.isdecimal() and len(part) < 10 and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, Mapping) and part in found:
            found = found[part]
        else:
            return None
    return found


def followed(root: Any) -> Any:
    """Return the schema that the `$ref` at the top of a whole schema leads to; `root` itself without one."""
    found, seen = root, set[str]()
    while isinstance(found, Mapping) and "properties" not in found and isinstance(found.get("$ref"), str):
        if found["$ref"] in seen:
            return root
        seen.add(found["$ref"])
        found = resolved(root, found["$ref"])
    return found if isinstance(found, Mapping) else root
