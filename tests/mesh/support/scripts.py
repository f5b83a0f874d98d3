"""Scripts that use the Python API, as a user starts them."""

import os
import subprocess
import sys
from pathlib import Path

import fake_oracle


def run(tmp_path: Path, text: str) -> None:
    """It ends well, and says "done" at last. It may import fake_oracle.py."""
    script = tmp_path / "script.py"
    script.write_text(text)
    paths = [str(Path(fake_oracle.__file__).parent), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, "-P", str(script)], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")
