"""These tests use the server process and the raw requests of tests/api."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "api"))
