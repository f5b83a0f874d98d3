"""The routes for who operates a server: development, documentation and the tokenizer's configuration.

They are a part of the table in operations.py."""

from meshlm.frontend.openai import response_schema as responses
from meshlm.frontend.openai import schema
from meshlm.frontend.rendering import schema as rendering
from meshlm.frontend.routes.operation import EVENTS, HTML, Operation, Parameter, switch
from meshlm.protocol.dashboard import History

TOKENIZER_INFO = (
    Operation(
        "/tokenizer_info", "tokenizer_info", rendering.TokenizerInfo, "The tokenizer's configuration and template."
    ),
)
_FORMAT = Parameter("config_format", "query", {"enum": ["text", "json"], "default": "text"}, "Of the configuration.")
DEVELOPMENT = (
    Operation(
        "/server_info",
        "operator.server_info",
        responses.ServerInfo,
        "The configuration, the environment and the versions.",
        errors=(400, 503),
        parameters=(_FORMAT,),
    ),
    Operation(
        "/reset_prefix_cache",
        "operator.reset_prefix_cache",
        responses.Reset,
        "Forget which prompts are computed.",
        None,
        ("POST",),
        (400, 503, 504),
        (
            switch("reset_running_requests", "Compute those that run anew; otherwise success is false while some do."),
            switch("reset_external", "Refused: there is no other prefix cache than the workers'."),
        ),
    ),
    Operation(
        "/pause",
        "operator.pause",
        responses.Paused,
        "Compute no step until POST /resume.",
        None,
        ("POST",),
        (400, 409, 503, 504),
        (
            Parameter(
                "mode",
                "query",
                {"enum": ["abort", "wait", "keep"], "default": "abort"},
                "What becomes of requests.",
            ),
            Parameter(
                "clear_cache",
                "query",
                {"type": "boolean", "default": True},
                "With abort and wait: POST /reset_prefix_cache, too.",
            ),
            switch("wait_for_inflight_requests", "The older name of mode wait."),
        ),
    ),
    Operation("/resume", "operator.resume", responses.Paused, "Compute steps again.", None, ("POST",), (409, 503, 504)),
    Operation(
        "/sleep",
        "operator.sleep",
        None,
        "Give the memory of weights and KV cache back until POST /wake_up (--enable-sleep-mode).",
        None,
        ("POST",),
        (400, 404, 409, 503, 504),
        (
            Parameter(
                "level",
                "query",
                {"enum": [0, 1, 2], "default": 1},
                "0: pause alone; 1: the weights go to the host's memory; 2: they are dropped, and loaded again.",
            ),
            Parameter(
                "mode",
                "query",
                {"enum": ["abort", "wait", "keep"], "default": "abort"},
                "What becomes of requests.",
            ),
        ),
    ),
    Operation(
        "/wake_up",
        "operator.wake_up",
        None,
        "Take the memory again, and compute steps.",
        None,
        ("POST",),
        (400, 404, 409, 503, 504),
        (
            Parameter(
                "tags",
                "query",
                {"type": "array", "items": {"enum": ["weights", "kv_cache", "scheduling"]}},
                "Of these alone; steps wait until both are there. scheduling: after level 0.",
            ),
        ),
    ),
    Operation(
        "/is_sleeping",
        "operator.is_sleeping",
        responses.IsSleeping,
        "Whether it sleeps, at whatever level.",
        errors=(404, 503),
    ),
    Operation(
        "/get_world_size",
        "operator.get_world_size",
        responses.WorldSize,
        "The number of workers.",
        errors=(400, 503),
        parameters=(
            Parameter("include_dp", "query", {"type": "boolean", "default": True}, "Of all data-parallel ranks."),
        ),
    ),
    Operation("/is_paused", "operator.is_paused", responses.IsPaused, "Whether the mesh is paused."),
    Operation(
        "/collective_rpc",
        "operator.collective_rpc",
        responses.RpcResults,
        "Call a method of --worker-extension-cls in every worker.",
        schema.CollectiveRpcRequest,
        ("POST",),
        (400, 404, 413, 503, 504),
    ),
    Operation(
        "/abort_requests",
        "operator.abort_requests",
        responses.Aborted,
        "End requests, whose answers have the finish_reason abort.",
        schema.AbortRequest,
        ("POST",),
        (400, 409, 413, 503, 504),
    ),
    Operation(
        "/scale_elastic_ep",
        "operator.scale_elastic_ep",
        responses.Scaled,
        "Have another number of data-parallel ranks, while the mesh serves; answers when that is done. 409 where they share experts.",
        schema.ScaleRequest,
        ("POST",),
        (400, 409, 413, 500, 503, 504),
    ),
    Operation(
        "/is_scaling_elastic_ep",
        "operator.is_scaling_elastic_ep",
        responses.IsScaling,
        "Whether ranks are being added or removed.",
        None,
        ("POST",),
        (503, 504),
    ),
    Operation(
        "/rebalance_experts",
        "operator.rebalance_experts",
        responses.Reset,
        "Move experts before the next step of all ranks (--enable-eplb), by what was counted of late.",
        None,
        ("POST",),
        (503, 504),
    ),
)
DASHBOARD = (
    Operation("/dashboard", "dashboard.page", HTML, "A page that shows the mesh; it asks for a key.", is_open=True),
    Operation(
        "/dashboard/events",
        "dashboard.events",
        EVENTS,
        "What it shows, up to ten times a second, without end.",
        errors=(400, 503),
        parameters=(
            Parameter("every", "query", {"type": "number", "minimum": 0.1, "maximum": 5.0}, "Seconds between events."),
        ),
    ),
    Operation("/dashboard/history", "dashboard.history", History, "The last thousand requests, and news."),
)
DOCUMENTATION = (
    Operation("/openapi.json", "openapi", "application/json", "This description (OpenAPI 3.1)."),
    Operation("/docs", "docs", HTML, "This description, to be read."),
    Operation("/redoc", "docs", HTML, "The same page as /docs."),
)
