"""What --otlp-traces-endpoint needs, told at once and not by a process that dies."""

import importlib.util
import os
from urllib.parse import urlsplit

from meshlm.protocol.config import ObservabilityConfig
from meshlm.runtime.extras import how_to_install
from meshlm.supervisor.errors import UsageError

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
EXPORTERS = {"grpc": "grpc", "http/protobuf": "http"}


def check(config: ObservabilityConfig) -> None:
    """UsageError for traces that cannot be sent as they are asked for."""
    if not config.otlp_traces_endpoint:
        return
    protocol = os.environ.get(PROTOCOL, "grpc")
    if protocol not in EXPORTERS:
        raise UsageError(f"{PROTOCOL}: {protocol!r} must be one of {', '.join(EXPORTERS)}")
    flag = f"--otlp-traces-endpoint {config.otlp_traces_endpoint}"
    try:
        parts = urlsplit(config.otlp_traces_endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url and (protocol != "grpc" or not config.otlp_traces_endpoint.rpartition(":")[2].isdecimal()):
        raise UsageError(f"{flag}: give a URL, http://HOST:4317 say")
    name = f"opentelemetry.exporter.otlp.proto.{EXPORTERS[protocol]}"
    if not _is_there("opentelemetry.sdk") or not _is_there(name):
        raise UsageError(f"{flag}: its packages are not installed; {how_to_install('otel')}")


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that it is in
        return False
