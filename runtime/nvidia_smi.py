"""What the NVIDIA driver tells of its GPUs through nvidia-smi, which needs no CUDA context of the process that asks."""

import shutil
import subprocess

LIMIT_S = 20.0


def query(properties: str, *options: str) -> list[str] | None:
    """A line for each GPU, its properties with commas between. None where there is no nvidia-smi, OSError where it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", *options, f"--query-gpu={properties}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from None
    return done.stdout.strip().splitlines()
