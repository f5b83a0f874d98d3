"""How the group of processes is kept: start, restarts, shutdown and logs."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from meshlm.protocol.config.per_node import PER_NODE


class RunConfig(Struct, frozen=True, kw_only=True):
    """The processes: their run directory, restarts, shutdown and logs."""

    run_dir: Annotated[str, Meta(description="directory for sockets and state, mode 0700; default: one per port")] = ""
    drain_timeout: Annotated[float, Meta(ge=0, description="seconds that SIGTERM lets running requests finish")] = 30.0
    startup_timeout: Annotated[float, Meta(gt=0, description="seconds until all processes must be ready")] = 600.0
    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            description="restarts of one process within a minute before all is given up (a request that kills what has it is "
            "given up before that)",
        ),
    ] = 5
    stall_timeout: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds of silence until a process is replaced (six times that while it starts); 0: never",
        ),
    ] = 10.0
    step_timeout: Annotated[
        float, Meta(ge=0, description="seconds that one step may take until its worker is replaced; 0: any time")
    ] = 120.0
    standby_roles: Annotated[
        tuple[Literal["none", "frontend", "detokenizer", "coordinator", "scheduler", "worker", "supervisor"], ...],
        Meta(description="roles of which a loaded process waits to take the place of one that dies", extra=PER_NODE),
    ] = ("detokenizer", "coordinator", "supervisor")
    orphan_grace: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds that a mesh which was ready serves on without its supervisor, until its standby or the next start "
            "with this run directory takes it over; then it ends. 0: it ends with its supervisor",
            extra=PER_NODE,
        ),
    ] = 30.0
    log_level: Annotated[
        str,
        Meta(
            description="of the processes' logs: debug, info, warning or error, or by process: info,worker=debug,frontend/1=error"
        ),
    ] = "info"
    log_format: Annotated[Literal["console", "json"], Meta(description="of the processes' logs")] = "console"
    log_color: Annotated[
        Literal["auto", "always", "never"],
        Meta(description="of console lines; auto: on a terminal, unless NO_COLOR is set"),
    ] = "auto"
    log_requests_per_s: Annotated[
        float,
        Meta(
            gt=0,
            description="lines of requests that each frontend logs; of more it logs a sample, and says of how many",
        ),
    ] = 100.0
