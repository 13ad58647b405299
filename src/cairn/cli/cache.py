"""`cairn cache`: the KV that a server stores outside its pool."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cairn.cli.common.options import Host, configured, server
from cairn.config.resolve import Resolved

if TYPE_CHECKING:
    from cairn.worker.check_codec_command import CheckResult

_CHECK = ("tokenizer", "engine", "device", "kernels", "weights", "threads", "context", "kv_dtype", "kv_dir", "kv_fresh")
_SERVER = ("api_key", "admin_key")
_STATS = (*_SERVER, "keep_packed_gb")


def register(app: typer.Typer) -> None:
    """Add `cairn cache stats`, `flush`, `scrub`, `prune` and `check-codec`."""
    cache = typer.Typer(help="Inspect and maintain the KV that a server has stored.", no_args_is_help=True)
    app.add_typer(cache, name="cache", rich_help_panel="Running servers")

    @cache.command()
    @configured(_STATS, model=False)
    def stats(resolved: Resolved, host: Host = None) -> None:
        """Show the stored KV by place, its use since the worker started, and the size of packed weights here."""
        from cairn.cli.common.output import amount
        from cairn.models.packing.packed_file import usage

        rows = _call(resolved, host, "GET", "", _stats)
        most = resolved.config.keep_packed_gb
        packed = usage(None if most is None else int(most * 1e9))
        size = f"{amount(packed.bytes)} of {amount(packed.budget)}"
        _print([*rows, ("packed weights", f"{packed.files:,} files here, {size}")])

    @cache.command()
    @configured(_SERVER, model=False)
    def flush(resolved: Resolved, host: Host = None) -> None:
        """Wait until all KV in the write queue is on disk."""
        _print(_call(resolved, host, "POST", "/flush", _stats))

    @cache.command()
    @configured(_SERVER, model=False)
    def scrub(resolved: Resolved, host: Host = None) -> None:
        """Read and verify every stored chunk; remove damaged ones."""
        _print(_call(resolved, host, "POST", "/scrub", _swept))

    @cache.command()
    @configured(_SERVER, model=False)
    def prune(resolved: Resolved, host: Host = None) -> None:
        """Remove stored chunks not used for --kv-ttl; pinned ones stay.

        Also remove packed weights on this machine that no start has used for thirty days.
        """
        from cairn.cli.common.output import amount
        from cairn.models.packing.packed_file import prune as prune_packed

        files, size = prune_packed()
        # Printed first: they are removed even if no server answers.
        _print([("packed weights", f"{files:,} files removed here, {amount(size)}")])
        _print(_call(resolved, host, "POST", "/prune", _swept))

    @cache.command(name="check-codec")
    @configured(_CHECK)
    def check_codec(
        resolved: Resolved,
        text: Annotated[
            Path | None, typer.Option(metavar="FILE", help="The text to read; default: Cairn's own source.")
        ] = None,
    ) -> None:
        """Compare 8-bit KV with exact KV on this model; --kv-codec q8 needs this check first.

        With --kv-dtype q8 it measures what that costs. It loads the model here and reads 2,000 tokens both ways; stop
        a server that uses the same --kv-dir first.
        """
        from cairn.system.posix import SystemClock, SystemFiles
        from cairn.worker.check_codec_command import check_codec as check

        _print(_checked(check(resolved.config, SystemFiles(), SystemClock(), os.environ, text)))


Rows = list[tuple[str, str]]


def _call(
    resolved: Resolved, host: str | None, method: str, order: str, rows_of: Callable[[dict[str, Any]], Rows]
) -> Rows:
    with server(resolved, host) as client:
        if method == "GET":
            return rows_of(client.get("/v1/cache" + order, admin=True))
        # No time limit: reading or writing a whole store takes long, and the server answers only at the end.
        return rows_of(client.post("/v1/cache" + order, {}, admin=True, patient=True))


def _print(rows: Rows) -> None:
    from cairn.cli.common.output import table

    table(("", ""), rows)


def _stats(found: dict[str, Any]) -> Rows:
    from cairn.cli.common.output import amount

    rows = [("model", found["model"])]
    for name, title in (("ram", "host memory"), ("disk", "disk")):
        tier = found[name]
        if tier is None:
            rows.append((title, "not used"))
            continue
        rows.append((title, f"{tier['chunks']:,} chunks, {amount(tier['bytes'])} of {amount(tier['budget'])}"))
        rows.append(("  pinned", f"{tier['pinned']:,} chunks"))
        rows.append(("  written", amount(tier["written"])))
        rows.append(("  read", amount(tier["read"])))
        rows.append(("  evicted", f"{tier['evicted']:,} chunks"))
        rows.append(("  damaged", f"{tier['damaged']:,} chunks"))
        rows.append(("  refused", f"{tier['refused']:,} chunks"))
        rows += [("  trouble", tier["trouble"])] if tier["trouble"] else []
    rows.append(("waiting", f"{found['queued']:,} chunks to be stored"))
    rows.append(("given up", f"{found['dropped']:,} chunks before they were stored"))
    rows.append(("put off", f"{found['deferred']:,} chunks: the day's bytes were written"))
    rows.append(("loaded", f"{found['loaded']:,} tokens in {found['load_seconds']:.2f} s"))
    rows.append(("loads ended", f"{found['abandoned']:,} early"))
    return rows


def _swept(found: dict[str, Any]) -> Rows:
    from cairn.cli.common.output import amount

    unreadable = found.get("unreadable", 0)
    return [
        ("checked", f"{found['checked']:,} chunks"),
        ("removed", f"{found['removed']:,} chunks, {amount(found['removed_bytes'])}"),
        *([("not readable now", f"{unreadable:,} chunks")] if unreadable else []),
    ]


def _checked(checked: CheckResult) -> Rows:
    from cairn.kv.disk.codec_comparison import MOST_AT_A_PLACE, MOST_DIFFERENCE, MOST_DIVERGENCE

    found = checked.found
    return [
        ("model", checked.model),
        ("codec", f"{found.codec}: {checked.bytes:,} bytes a token, {found.beside} {checked.raw_bytes:,}"),
        ("tokens", f"{found.positions:,}"),
        ("divergence", f"{found.divergence:.5f} nats in the mean (at most {MOST_DIVERGENCE})"),
        ("at a place", f"{found.at_a_place:.5f} nats or less at 99 of 100 (at most {MOST_AT_A_PLACE})"),
        (
            "perplexity",
            f"{found.perplexity:.4f}, {found.beside} {found.raw_perplexity:.4f} ({found.difference:+.3%}, at most "
            f"{MOST_DIFFERENCE:.0%})",
        ),
        ("greedy agreement", f"{found.agreed:,} of {found.positions:,} ({found.agreement:.2%}; not judged)"),
        ("may be used", "no: " + found.refusal if found.refusal else "yes"),
        ("remembered in", str(checked.folder)),
    ]
