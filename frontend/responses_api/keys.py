"""The owner of what is stored. Pure."""

import hashlib

from starlette.requests import Request


def key_of(request: Request) -> str:
    """The name of the request's API key: what it stores is nobody else's."""
    key = request.scope.get("meshlm.key", "")
    return hashlib.sha256(key.encode()).hexdigest()[:32] if key else ""
