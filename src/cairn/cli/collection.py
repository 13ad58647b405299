"""`cairn collection`: add documents to a running server, search them, and ask questions about them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from cairn.cli.common.options import Host, configured, server
from cairn.config.resolve import Resolved
from cairn.types.errors import CairnError, ConfigError

if TYPE_CHECKING:
    from cairn.cli.connection.client import Client

_SERVER = ("api_key",)
_Id = Annotated[str, typer.Argument(metavar="ID", help="The collection.")]
_Top = Annotated[int | None, typer.Option("--top", "-k", min=1, metavar="N", help="Most passages to find.")]
_Least = Annotated[float | None, typer.Option(metavar="SCORE", help="Leave out passages below this score.")]
_Rerank = Annotated[
    bool | None, typer.Option("--rerank/--no-rerank", help="Whether a reranking model orders the passages.")
]


def register(app: typer.Typer) -> None:
    """Add `cairn collection` and its commands."""
    collection = typer.Typer(help="Store documents, search them, and ask about them.", no_args_is_help=True)
    app.add_typer(collection, name="collection", rich_help_panel="Running servers")
    _register_changes(collection)
    _register_looks(collection)
    _register_questions(collection)


def _register_changes(collection: typer.Typer) -> None:
    @collection.command()
    @configured(_SERVER, model=False)
    def create(
        resolved: Resolved,
        id: _Id,
        chunk: Annotated[int | None, typer.Option(metavar="N", help="Most characters of a chunk.")] = None,
        overlap: Annotated[int | None, typer.Option(metavar="N", help="Characters shared by adjacent chunks.")] = None,
        host: Host = None,
    ) -> None:
        """Create a collection."""
        body = {"id": id, "chunk": chunk, "overlap": overlap}
        with server(resolved, host) as client:
            client.post("/v1/collections", {name: value for name, value in body.items() if value is not None})

    @collection.command()
    @configured(_SERVER, model=False)
    def add(
        resolved: Resolved,
        id: _Id,
        files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Documents, or folders of them.")],
        note: Annotated[
            list[str] | None, typer.Option("--metadata", metavar="NAME=TEXT", help="Metadata of each document.")
        ] = None,
        host: Host = None,
    ) -> None:
        """Add documents: txt, md, html, pdf, docx. Files that cannot be read are named; the others are added."""
        import json

        found = [file for one in files for file in _documents(one)]
        if not found:
            raise ConfigError(f"there is no document in {', '.join(map(str, files))}")
        fields = {"stream": "true", "metadata": json.dumps(_noted(note or ()))}
        with server(resolved, host) as client:
            client.get(path(id))  # an unknown collection is reported once, not for each document
            missed = _add(client, path(id, "documents"), found, fields)
        if missed:
            raise CairnError(f"{missed} of {len(found)} documents were not added")

    @collection.command()
    @configured(_SERVER, model=False)
    def rm(
        resolved: Resolved,
        id: _Id,
        documents: Annotated[
            list[str] | None, typer.Argument(metavar="[DOCUMENT...]", help="Delete only these documents, by id.")
        ] = None,
        host: Host = None,
    ) -> None:
        """Delete a collection, or some of its documents. This cannot be undone."""
        with server(resolved, host) as client:
            for document in documents or ():
                client.delete(path(id, f"documents/{quote(document, safe='')}"))
            if not documents:
                client.delete(path(id))


def _register_looks(collection: typer.Typer) -> None:
    @collection.command(name="list")
    @configured(_SERVER, model=False)
    def list_(resolved: Resolved, host: Host = None) -> None:
        """List the collections, most recently created first."""
        from cairn.cli.common.output import table

        with server(resolved, host) as client:
            found = list(client.items("/v1/collections"))
        rows = [
            (one["id"], str(one["documents"]), str(one["chunks"]), one["embedding_model"] or "-", one["name"] or "-")
            for one in found
        ]
        table(("collection", "documents", "chunks", "embedding model", "name"), rows)

    @collection.command()
    @configured(_SERVER, model=False)
    def show(resolved: Resolved, id: _Id, host: Host = None) -> None:
        """List the documents of a collection."""
        from cairn.cli.common.output import amount, table

        with server(resolved, host) as client:
            found = list(client.items(path(id, "documents")))
        rows = [(one["id"], one["name"], one["type"], amount(one["bytes"]), str(one["chunks"])) for one in found]
        table(("document", "name", "type", "size", "chunks"), rows)


def _register_questions(collection: typer.Typer) -> None:
    @collection.command()
    @configured(_SERVER, model=False)
    def search(
        resolved: Resolved,
        id: _Id,
        query: Annotated[str, typer.Argument(metavar="QUERY")],
        top: _Top = None,
        min_score: _Least = None,
        rerank: _Rerank = None,
        host: Host = None,
    ) -> None:
        """Find the passages that match a query best."""
        from cairn.cli.common.output import table

        with server(resolved, host) as client:
            answer = client.post(path(id, "search"), _question(query, top, min_score, rerank))
        rows = [
            (f"{one.get('rerank_score', one['score']):.3f}", _where(one), " ".join(one["text"].split())[:300])
            for one in answer["data"]
        ]
        table(("score", "where", "passage"), rows)

    @collection.command()
    @configured(_SERVER, model=False)
    def ask(
        resolved: Resolved,
        id: _Id,
        question: Annotated[str, typer.Argument(metavar="QUESTION")],
        top: _Top = None,
        min_score: _Least = None,
        rerank: _Rerank = None,
        host: Host = None,
    ) -> None:
        """Answer a question from the documents; print its sources on stderr, or that none is cited."""
        from cairn.cli.common.output import printable, talk

        body = _question(question, top, min_score, rerank) | {"stream": True}
        ended: Mapping[str, Any] = {}
        said = False
        with server(resolved, host) as client:
            for event in client.events(path(id, "ask"), body):
                if event["type"] == "answer.delta":
                    print(printable(event["content"]), end="", flush=True)
                    said = True
                elif event["type"] == "answer.done":
                    ended = event
        if not ended:
            raise CairnError("the answer was cut off")
        print("" if said else ended["answer"])
        console = talk()
        if said and not ended["answered"]:
            console.print("No source is cited: the answer may not come from the documents.", markup=False)
        for one in ended["sources"]:
            if one["cited"]:
                console.print(printable(f"[{one['number']}] {_where(one)}"), markup=False, soft_wrap=True)


def path(id: str, more: str = "") -> str:
    """Return a collection's route. ConfigError for an invalid id."""
    from cairn.rag.definition import ID

    if not ID.fullmatch(id):
        raise ConfigError(
            f"{id!r} is not a collection's id: one has 1 to 64 letters, digits, dots, underscores and hyphens"
        )
    return f"/v1/collections/{quote(id, safe='')}" + (f"/{more}" if more else "")


def _question(query: str, top: int | None, min_score: float | None, rerank: bool | None) -> dict[str, Any]:
    body = {"query": query, "top_k": top, "min_score": min_score, "rerank": rerank}
    return {name: value for name, value in body.items() if value is not None}


def _where(one: Mapping[str, Any]) -> str:
    return f"{one['name']}: {one['heading']}" if one["heading"] else str(one["name"])


def _noted(given: Sequence[str]) -> dict[str, str]:
    fields = {}
    for pair in given:
        name, mark, value = pair.partition("=")
        if not mark or not name:
            raise ConfigError(f"--metadata {pair[:64]!r} should look like NAME=TEXT")
        fields[name] = value
    return fields


def _documents(place: Path) -> Iterator[Path]:
    """Yield a file, or the documents below a folder, chosen by their suffixes."""
    from cairn.rag.definition import KINDS

    if not place.is_dir():
        yield place
        return
    for file in sorted(place.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(place).parts)
        if file.is_file() and not hidden and file.suffix.lower().removeprefix(".") in {*KINDS, "txt"}:
            yield file


def _add(client: Client, route: str, files: Sequence[Path], fields: Mapping[str, str]) -> int:
    """Add documents one after the other; return how many failed."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from cairn.cli.common.output import printable, talk

    missed, console = 0, talk()
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        whole = bar.add_task("documents", total=len(files))
        for file in files:
            one = bar.add_task(printable(file.name)[:40], total=None)
            try:
                for event in client.send_form(route, file, fields):
                    if event["type"] == "document.embedding":
                        bar.update(one, completed=event["embedded"], total=event["chunks"])
                    elif event["type"] == "document.done":
                        made = event["document"]
                        print("\t".join((made["id"], printable(str(file)), str(made["chunks"]))))
            except CairnError as error:
                if error.status in (401, 403, 404, 503):
                    raise
                missed += 1
                console.print(printable(f"{file}: {error}"), markup=False, soft_wrap=True)
            bar.remove_task(one)
            bar.advance(whole)
    return missed
