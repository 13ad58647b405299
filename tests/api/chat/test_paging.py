"""Pages of lists whose items are slow to build: only the page's items are built, and the event loop runs in between."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cairn.api.chat.paging import page, page_by_id
from cairn.types.errors import NotFound

IDS = {f"i{at}": 1_000.0 - at for at in range(1_000)}


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


@pytest.mark.parametrize("ascending", [False, True])
def test_a_page_begins_after_a_place_though_no_item_is_there(ascending: bool) -> None:
    """A router asks all servers for what follows an item that one of them has."""
    items = [{"id": id, "created": time} for time, id in ((3.0, "a"), (2.0, "b"), (2.0, "d"), (1.0, "c"))]
    items = items[::-1] if ascending else items

    def after(place: str) -> str:
        return "".join(item["id"] for item in page(items, 9, place, ascending=ascending)["data"])

    assert after("2.0:c") == ("ba" if ascending else "dc") and after("2.0:b") == ("a" if ascending else "dc")
    assert after("9.5:z") == ("" if ascending else "abdc") and after("0.5:z") == ("cdba" if ascending else "")
    assert after("b") == ("a" if ascending else "dc"), "an item's id is a place, too"
    for wrong in ("x", "x:b", "nan:b", "inf:b", ":", ""):
        with pytest.raises(NotFound):
            after(wrong)
    with pytest.raises(NotFound):
        page([{"id": "a"}], 9, "2.0:c", ascending=ascending)
