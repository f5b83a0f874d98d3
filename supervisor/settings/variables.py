"""Flags of vLLM's that are environment variables here: they hold for this process and all that it starts. Called by vllm_flags.py and
api/arguments.py."""

import argparse
import os
from collections.abc import Callable
from typing import Any


def set_hf_token(value: Any) -> None:
    """A token of the hub. None and true: the one that `hf auth login` has saved, as without the flag."""
    if isinstance(value, str) and value:
        os.environ["HF_TOKEN"] = value
    elif not (value is None or isinstance(value, bool)):
        raise argparse.ArgumentTypeError(f"must be a token, got {value!r}")


def set_device_ids(value: Any) -> None:
    """GPUs by their numbers, or by their UUIDs: '2,3', or a list. Where CUDA_VISIBLE_DEVICES is set numbers count the GPUs in it."""
    ids = [part.strip() for part in value.split(",")] if isinstance(value, str) else [str(part) for part in value or ()]
    numbers = [part.isdecimal() for part in ids]
    if not ids or not all(ids) or len(set(ids)) < len(ids) or any(numbers) != all(numbers):
        raise argparse.ArgumentTypeError(f"must be numbers of GPUs or UUIDs, each once, as 2,3; got {value!r}")
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    if visible and numbers[0]:
        if outside := [part for part in ids if int(part) >= len(visible)]:
            text = f"{outside[0]} is none of the {len(visible)} GPUs of CUDA_VISIBLE_DEVICES={','.join(visible)}"
            raise argparse.ArgumentTypeError(text)
        ids = [visible[int(part)] for part in ids]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)


SETTERS: dict[str, Callable[[Any], None]] = {"--hf-token": set_hf_token, "--device-ids": set_device_ids}
