"""The real meshes of tests/mesh, for tests of what all processes share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "mesh"))
sys.path.insert(0, str(Path(__file__).parent))
