"""Scripts that use the Python API, as a user starts them."""

import subprocess
import sys
from pathlib import Path


def run(tmp_path: Path, text: str) -> None:
    """It ends well, and says "done" at last."""
    script = tmp_path / "script.py"
    script.write_text(text)
    done = subprocess.run([sys.executable, "-P", str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")
