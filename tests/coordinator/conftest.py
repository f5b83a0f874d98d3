"""Coordinator tests share coordinator_bench.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
