"""A front for tests to kill: `front.py FOLDER MODE` serves the model with a worker of this mode of `faulty_worker`.

It starts requests, the last of which triggers the mode, and prints the worker's pid.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from faulty_worker import KILLER
from tiny import config, request

from cairn.frontend import launch
from cairn.frontend.service import Service


async def main() -> None:
    launch.WORKER = (sys.executable, str(Path(__file__).parent / "faulty_worker.py"), sys.argv[2])
    service = await Service.start(config(Path(sys.argv[1])))
    streams = [service.generate(request(service, f"r{n}", 2000)) for n in range(4)]
    await anext(streams[0])
    streams.append(service.generate(request(service, (KILLER, 1), 5)))
    await asyncio.sleep(0.2)
    print(service.stats().worker_pid, flush=True)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main())
