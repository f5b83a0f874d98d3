"""Tests of the group share group_bench.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
