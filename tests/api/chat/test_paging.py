"""Pages of lists whose items are slow to build: only the page's items are built, and the event loop runs in between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cairn.api.chat.paging import page_by_id
from cairn.types.errors import NotFound

IDS = [f"i{at}" for at in range(1_000)]


async def test_only_the_items_of_a_page_are_made() -> None:
    made: list[str] = []

    def show(id: str) -> dict[str, Any]:
        made.append(id)
        return {"id": id, "large": True}

    result = await page_by_id(IDS, 3, "i4", show)
    assert made == ["i5", "i6", "i7"] and result["data"] == [{"id": id, "large": True} for id in made]
    assert (result["first_id"], result["last_id"], result["has_more"]) == ("i5", "i7", True)
    with pytest.raises(NotFound, match="there is no item 'x' here"):
        await page_by_id(IDS, 3, "x", show)


async def test_the_loop_runs_between_items_and_deleted_ones_are_skipped() -> None:
    made: list[str] = []

    def show(id: str) -> dict[str, Any]:
        made.append(id)
        if id == "i1":
            raise NotFound("gone")
        return {"id": id}

    turns: list[int] = []

    async def other() -> None:
        while len(made) < 5:
            turns.append(len(made))
            await asyncio.sleep(0)

    page, _ = await asyncio.gather(page_by_id(IDS, 5, None, show), other())
    assert [item["id"] for item in page["data"]] == ["i0", "i2", "i3", "i4"]
    assert turns == [1, 2, 3, 4]
