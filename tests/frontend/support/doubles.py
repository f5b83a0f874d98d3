"""What stands in a Backend's place in tests."""

from types import SimpleNamespace
from typing import Any

from parsing import RESOLVED

from meshlm.frontend.http.rate_limits import RateLimits
from meshlm.frontend.requests.adapters import Adapters
from meshlm.frontend.requests.admission import PoisonBodies
from meshlm.frontend.requests.resolving import Resolving
from meshlm.protocol.config import MeshConfig, ServerConfig


def plays_all_parts(double: Any) -> Any:
    """The double itself is each part of a Backend: its requests, its readiness, its observer and its operations. Its adapters are those
    of its model."""
    double.requests = double.readiness = double.observer = double.operations = double
    double.adapters, double.resolving = Adapters(), Resolving(())
    double.adapters.begin(double.resolved)
    return double


def backend_without_mesh(**server: Any) -> Any:
    """A Backend with these settings of its server, for requests that never reach a mesh."""
    config = MeshConfig(server=ServerConfig(**server), resolved=RESOLVED)
    return plays_all_parts(
        SimpleNamespace(
            config=config,
            resolved=RESOLVED,
            version="1.2",
            refusal=lambda *, attaches: "",
            refused=lambda seconds: None,
            ignored=lambda unknown, path: None,
            rates=RateLimits(""),
            poison=PoisonBodies(),
            endpoints=(),
        )
    )
