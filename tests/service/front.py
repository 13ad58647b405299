"""A front for the tests to kill: serves the model folder given as its argument and prints the worker's pid."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tiny import config, request

from cairn.service.service import Service


async def main() -> None:
    service = await Service.start(config(Path(sys.argv[1])))
    streams = [service.generate(request(service, f"r{n}", 2000)) for n in range(4)]
    await anext(streams[0])
    print(service.stats().worker_pid, flush=True)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main())
