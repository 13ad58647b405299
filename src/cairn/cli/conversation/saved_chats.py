"""Saved chats: one JSON file each, written after every answer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cairn.config.paths import home
from cairn.types.errors import CairnError, NotFound

VERSION = 1
MAX_CHAT_BYTES = 1 << 26
"""Most bytes of a chat's file."""
TITLE = 60
"""Most characters of a chat's title."""


@dataclass(slots=True)
class SavedChat:
    """One conversation in the terminal."""

    id: str
    """The time that it began, so that file names sort by age."""
    model: str
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The start of the first question."""
        first = next((str(one.get("content", "")) for one in self.messages if one.get("role") == "user"), "")
        line = " ".join(first.split())
        return line if len(line) <= TITLE else line[: TITLE - 1] + "…"

    @property
    def day(self) -> str:
        """The day it began, as 2026-11-28."""
        return f"{self.id[:4]}-{self.id[4:6]}-{self.id[6:8]}"


def chats_folder(env: Mapping[str, str] | None = None) -> Path:
    """Return the folder of saved chats and of the history: cairn/chats in the user's data folder."""
    base = (os.environ if env is None else env).get("XDG_DATA_HOME")
    return (Path(base) if base else home() / ".local" / "share") / "cairn" / "chats"


class SavedChats:
    """The folder of saved chats."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def new_id() -> str:
        """Return an id for a chat that begins now; it contains the process id, so no two are equal."""
        return f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{os.getpid()}"

    def save(self, chat: SavedChat) -> None:
        """Write a chat atomically. Raises CairnError if it cannot be written."""
        body = {"version": VERSION, "model": chat.model, "system": chat.system, "messages": chat.messages}
        text = json.dumps(body, ensure_ascii=False, indent=1) + "\n"
        path = self._path(chat.id)
        fresh = path.with_suffix(f".{os.getpid()}.new")
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(text.encode("utf-8", "replace"))
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError as error:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise CairnError(f"this chat cannot be saved in {self.folder}: {error.strerror or error}") from None

    def newest(self, count: int) -> list[SavedChat]:
        """Return the `count` most recently changed chats, newest first; files that cannot be read are skipped."""
        found: list[SavedChat] = []
        for path in sorted(self._files(), key=_changed, reverse=True):
            if len(found) == count:
                break
            try:
                found.append(self.load(path.stem))
            except CairnError:
                continue
        return found

    def load(self, id: str) -> SavedChat:
        """Return a chat. Raises NotFound if there is none, CairnError if its file cannot be read."""
        path = self._path(id)
        try:
            if path.stat().st_size > MAX_CHAT_BYTES:
                raise CairnError(f"{path} has more than {MAX_CHAT_BYTES} bytes, the limit of a chat")
            body = json.loads(path.read_bytes())
            if body["version"] != VERSION:
                raise CairnError(f"{path} is of version {body['version']}; this Cairn reads version {VERSION}")
            messages = [dict(one) for one in body["messages"]]
            system = body["system"]
            if not all(isinstance(one.get("role"), str) for one in messages) or not isinstance(system, str | None):
                raise TypeError
            return SavedChat(id, str(body["model"]), system, messages)
        except FileNotFoundError:
            raise NotFound(f"there is no chat {id} in {self.folder}") from None
        except OSError as error:
            raise CairnError(f"{path} cannot be read: {error.strerror or error}") from None
        except (ValueError, LookupError, TypeError, RecursionError):
            raise CairnError(f"{path} cannot be read as a chat") from None

    def delete(self, id: str) -> None:
        """Delete a chat; an unknown id is not an error."""
        try:
            self._path(id).unlink(missing_ok=True)
        except OSError as error:
            raise CairnError(f"the chat {id} cannot be deleted: {error.strerror or error}") from None

    def _files(self) -> list[Path]:
        try:
            return list(self.folder.glob("*.json"))
        except OSError:
            return []

    def _path(self, id: str) -> Path:
        if not id or "/" in id or id.startswith("."):
            raise NotFound(f"{id!r} is not the id of a chat")
        return self.folder / f"{id}.json"


def _changed(path: Path) -> tuple[float, str]:
    try:
        return path.stat().st_mtime, path.name
    except OSError:
        return 0.0, path.name
