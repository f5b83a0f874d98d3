"""Attention backends that need another package: what it is called, what to install, which GPUs it is for. Imports nothing of it."""

import importlib.util
from typing import NamedTuple


class AttentionPackage(NamedTuple):
    flag: str  # as vLLM names it
    module: str
    install: str
    first: tuple[int, int]  # compute capabilities from this one on, and up to `beyond`
    beyond: tuple[int, int]
    needs: str
    head_dims: tuple[int, ...]

    def missing(self) -> str:
        """What to install; "" where it is installed."""
        try:
            there = importlib.util.find_spec(self.module) is not None
        except (ImportError, ValueError):  # half an installation
            there = False
        return "" if there else f"it needs the package {self.module}: {self.install}, or use auto"


PACKAGES = {
    "flash_attn": AttentionPackage(
        "FLASH_ATTN",
        "flash_attn_interface",
        "build FlashAttention 3 from the folder hopper of github.com/Dao-AILab/flash-attention",
        (9, 0),
        (10, 0),
        "FlashAttention 3 needs compute capability 9",
        (64, 96, 128, 192, 256),
    ),
    "flashinfer": AttentionPackage(
        "FLASHINFER",
        "flashinfer",
        "pip install flashinfer-python",
        (8, 0),
        (13, 0),
        "FlashInfer needs compute capability 8.0",
        (64, 128, 256),
    ),
}
