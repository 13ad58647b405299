"""`cairn tune`: measure which options make a model fastest on this machine, and keep them for its next start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from cairn.cli.common.options import configured
from cairn.config.resolve import Resolved

MOST_SECONDS = 300.0
BUSY = 0.5
"""Running programs for each core above which a measurement is doubtful."""


def register(app: typer.Typer) -> None:
    """Add `cairn tune`."""

    @app.command(rich_help_panel="This machine")
    @configured(("threads", "kernels", "weights", "kv_dtype", "step_tokens"))
    def tune(
        resolved: Resolved,
        seconds: Annotated[
            float, typer.Option(metavar="X", min=10, max=3600, help="Most seconds to measure.")
        ] = MOST_SECONDS,
        keep: Annotated[
            Path | None, typer.Option("--profile", metavar="FILE", help="File of the result; default: chosen by Cairn.")
        ] = None,
    ) -> None:
        """Measure which threads, kernels, type of KV and step length make MODEL fastest here, and keep what pays.

        The next start with the same model on this machine uses them; `cairn config MODEL` shows them, and
        `--profile none` leaves them out. Options that are set stay as they are.
        """
        from cairn.cli.common.output import table, talk
        from cairn.config.paths import expanded
        from cairn.engine import profile
        from cairn.engine.machine import cpu_count
        from cairn.engine.tune import Tuner, check_tunable
        from cairn.models.hub import hub
        from cairn.models.spec.config import check_decodes, identified, load_spec
        from cairn.system.posix import SystemClock

        config, console = resolved.config, talk()
        place = hub.locate(config.model)
        spec = check_decodes(load_spec(place, identify=False))
        check_tunable(spec, config)
        spec = identified(spec, place)
        clock, number = SystemClock(), 0
        if os.getloadavg()[0] > BUSY * cpu_count():
            console.print(
                "Other programs compute here now: what is measured beside them may be wrong. Try again later."
            )
        began = clock.now()

        def tell(line: str) -> None:
            nonlocal number
            number += 1
            console.print(f"[{clock.now() - began:3.0f} s] {number}. {line}", markup=False)

        tuner = Tuner(spec, place, config, frozenset(resolved.sources), now=clock.now, seconds=seconds, tell=tell)
        options, before, after = tuner.run()
        path = profile.path_of(spec.identity) if keep is None else expanded(keep)
        rows = [
            (name, f"{one:.1f}", f"{two:.1f}", f"{two / one:.2f}")
            for name, one, two in (
                ("prompt", before.prefill, after.prefill),
                ("one sequence", before.decode, after.decode),
                ("eight sequences", before.decode_8, after.decode_8),
            )
        ]
        table(("tokens per second", "before", "after", "gain"), rows)
        given = options.given()
        if not given:
            path.unlink(missing_ok=True)
            console.print("The defaults are the fastest here: no profile is kept.")
            return
        table(("option", "value"), [(name, str(value)) for name, value in given.items()])
        profile.write(path, profile.Profile(spec.name, spec.identity.hex(), profile.machine(), options, before, after))
        if {"kernels", "kv_dtype"} & given.keys():
            console.print("With these kernels or this type of KV, KV stored before is not found; it is computed again.")
        console.print(f"Kept in {path}; the next start uses it.", markup=False)
