"""What GET /v1/models says of a model, in vLLM's form. Called by routes.py."""

import time
from typing import Any

from meshlm.protocol.config import Resolved


def model_card(name: str, resolved: Resolved) -> dict[str, Any]:
    """One of the names that the model is served under."""
    created = int(time.time())
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "meshlm",
        "root": resolved.model_path,
        "parent": None,
        "max_model_len": resolved.max_model_len,
        "permission": [_permission(name, created)],
    }


def _permission(name: str, created: int) -> dict[str, Any]:
    """The permission object of a model: OpenAI's first clients read it, and vLLM still sends it."""
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
