"""The simulation's modules import each other by name, as tests/mesh does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
