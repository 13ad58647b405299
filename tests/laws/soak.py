"""Runs the simulator with new seeds until it is stopped or a law breaks: `python -m tests.laws.soak [first seed]`."""

from __future__ import annotations

import secrets
import sys
from collections import Counter

from tests.laws.simulator import run_many

BATCH = 1000


def main() -> None:
    first = int(sys.argv[1]) if len(sys.argv) > 1 else secrets.randbits(40)
    total: Counter[str] = Counter()
    print(f"seeds from {first}")
    while True:
        total += run_many(first + total["schedules"], BATCH)
        print(", ".join(f"{value:,} {name}" for name, value in total.items()), flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(0)
