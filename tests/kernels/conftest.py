"""Kernels are tested on the GPU where there is one, and by Triton's interpreter on the CPU elsewhere."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # for device.py

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
