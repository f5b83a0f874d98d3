"""Reads what ptxas made of a kernel, by the disassembler that comes with Triton."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton

NVDISASM = Path(str(triton.__file__)).parent / "backends/nvidia/bin/nvdisasm"
MERGE = re.compile(r"(F2FP\S*E4M3\S*PACK_AB_MERGE_C .*?) ;")


def roundings_onto_nothing(cubin: bytes) -> list[str]:
    """Roundings to 8-bit floats that put their two results beside what no rounding has written: in a register, or zeros.

    ptxas of CUDA 12.8, which Triton 3.6 brings, does it where it knows that numbers are the same; what comes out is what the
    register had held.
    """
    text = _text(cubin)
    written, found = {"RZ"}, []
    for line in MERGE.findall(text):
        to, _, _, onto = line.split(None, 1)[1].split(", ")
        if onto.removesuffix(".reuse") not in written:
            found.append(line)
        written.add(to)
    return found


def exchanges(cubin: bytes) -> int:
    """Barriers, and values passed between the threads of a warp."""
    return len(re.findall(r"BAR\.SYNC|SHFL", _text(cubin)))


def _text(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout
