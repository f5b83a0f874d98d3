"""Flags of vLLM's that are environment variables here: they hold for this process and all that it starts. Called by vllm_flags.py and
api/arguments.py."""

import argparse
import os
from typing import Any


def set_variable(name: str, value: Any) -> None:
    """Sets it to a text. None and true ask for what is there without it (of HF_TOKEN what `hf auth login` has saved).

    ArgumentTypeError for anything else.
    """
    if isinstance(value, str) and value:
        os.environ[name] = value
    elif value not in (None, True, False):
        raise argparse.ArgumentTypeError(f"must be a text that is not empty, got {value!r}")
