"""`cairn cache`: the KV that a server keeps beyond its pool."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cairn.cli.options import Host, configured, server
from cairn.config.resolve import Resolved

if TYPE_CHECKING:
    from cairn.worker.check_codec import CheckResult

_CHECK = ("tokenizer", "engine", "device", "kernels", "weights", "threads", "context", "kv_dtype", "kv_dir", "kv_fresh")
_SERVER = ("api_key", "admin_key")
_STATS = (*_SERVER, "keep_packed_gb")


def register(app: typer.Typer) -> None:
    """Add `cairn cache stats`, `flush`, `scrub`, `prune` and `check-codec`."""
    cache = typer.Typer(help="Look at and look after the KV that a server has stored.", no_args_is_help=True)
    app.add_typer(cache, name="cache", rich_help_panel="Running servers")

    @cache.command()
    @configured(_STATS, model=False)
    def stats(resolved: Resolved, host: Host = None) -> None:
        """Show what is stored, where, and what became of it since the server's worker started; and what packed weights
        take on this machine."""
        from cairn.cli.output import amount
        from cairn.models.packing.packed_file import usage

        rows = _call(resolved, host, "GET", "", _stats)
        most = resolved.config.keep_packed_gb
        packed = usage(None if most is None else int(most * 1e9))
        size = f"{amount(packed.bytes)} of {amount(packed.budget)}"
        _print([*rows, ("packed weights", f"{packed.files:,} files here, {size}")])

    @cache.command()
    @configured(_SERVER, model=False)
    def flush(resolved: Resolved, host: Host = None) -> None:
        """Wait until all KV that is to be stored is durable."""
        _print(_call(resolved, host, "POST", "/flush", _stats))

    @cache.command()
    @configured(_SERVER, model=False)
    def scrub(resolved: Resolved, host: Host = None) -> None:
        """Read and check every stored chunk; damaged ones are removed."""
        _print(_call(resolved, host, "POST", "/scrub", _swept))

    @cache.command()
    @configured(_SERVER, model=False)
    def prune(resolved: Resolved, host: Host = None) -> None:
        """Remove stored chunks that nobody has used for --kv-ttl; pinned ones stay. On this machine also packed
        weights that no start has used for thirty days."""
        from cairn.cli.output import amount
        from cairn.models.packing.packed_file import prune as prune_packed

        files, size = prune_packed()
        # Told first: there may be no server, and they are gone all the same.
        _print([("packed weights", f"{files:,} files removed here, {amount(size)}")])
        _print(_call(resolved, host, "POST", "/prune", _swept))

    @cache.command(name="check-codec")
    @configured(_CHECK)
    def check_codec(
        resolved: Resolved,
        text: Annotated[
            Path | None, typer.Option(metavar="FILE", help="What the model reads; default: Cairn's own source.")
        ] = None,
    ) -> None:
        """Compare KV as 8-bit integers with KV as it is, on this model: what --kv-codec q8 needs first, and with
        --kv-dtype q8 what that does.

        Loads the model here. It reads 2,000 tokens both ways; stop a server that has the same --kv-dir open.
        """
        from cairn.system.posix import SystemClock, SystemFiles
        from cairn.worker.check_codec import check_codec as check

        _print(_checked(check(resolved.config, SystemFiles(), SystemClock(), os.environ, text)))


Rows = list[tuple[str, str]]


def _call(
    resolved: Resolved, host: str | None, method: str, order: str, told: Callable[[dict[str, Any]], Rows]
) -> Rows:
    with server(resolved, host) as client:
        if method == "GET":
            return told(client.get("/v1/cache" + order, admin=True))
        # A store is read, or written, as long as its disk takes, and the server has nothing to say before the end.
        return told(client.post("/v1/cache" + order, {}, admin=True, patient=True))


def _print(rows: Rows) -> None:
    from cairn.cli.output import table

    table(("", ""), rows)


def _stats(found: dict[str, Any]) -> Rows:
    from cairn.cli.output import amount

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
    from cairn.cli.output import amount

    unreadable = found.get("unreadable", 0)
    return [
        ("checked", f"{found['checked']:,} chunks"),
        ("removed", f"{found['removed']:,} chunks, {amount(found['removed_bytes'])}"),
        *([("not readable now", f"{unreadable:,} chunks")] if unreadable else []),
    ]


def _checked(checked: CheckResult) -> Rows:
    from cairn.kv.disk.codec_check import MOST_AT_A_PLACE, MOST_DIFFERENCE, MOST_DIVERGENCE

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
