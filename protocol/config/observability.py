"""What an operator can see of the mesh beyond the metrics that are always there."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

DetailedTraces = Literal["model", "worker", "all"]


class ObservabilityConfig(Struct, frozen=True, kw_only=True):
    """Metrics that cost something, and traces."""

    kv_cache_metrics: Annotated[
        bool, Meta(description="/metrics shows how long pages of the KV cache live, lie idle and wait to be used again")
    ] = False
    kv_cache_metrics_sample: Annotated[
        float, Meta(gt=0, le=1, description="share of the pages that these metrics look at")
    ] = 0.01
    metrics_prefix: Annotated[
        Literal["meshlm", "vllm"],
        Meta(description="before the names of /metrics; vllm: for routers and dashboards that look for vLLM's"),
    ] = "meshlm"
    otlp_traces_endpoint: Annotated[
        str,
        Meta(
            description="address of an OpenTelemetry collector, which gets a trace of each request (packages of the extra otel)"
        ),
    ] = ""
    collect_detailed_traces: Annotated[
        tuple[DetailedTraces, ...],
        Meta(description="traces have the spans of every sequence of a request, not of its slowest alone"),
    ] = ()
    enable_mfu_metrics: Annotated[
        bool, Meta(description="/metrics estimates the operations and the bytes of memory of each step")
    ] = False
