"""Which --cudagraph-mode a worker uses: what was asked, as far as the model and the backend allow it. Pure; used by the kit."""

from collections.abc import Callable

from meshlm.protocol.config.engine import WorkerConfig


def mode_of(worker: WorkerConfig, why_no_prompts: Callable[[], str]) -> tuple[str, str]:
    """The mode and, where it is not the one that was asked for, why.

    why_no_prompts: why graphs must hold decodes alone; "" where they may hold prompts. Asked where it matters.
    """
    asked = worker.cudagraph_mode
    if worker.enforce_eager:
        return "NONE", "--enforce-eager" if asked != "NONE" else ""
    if worker.profile_layers:
        return "NONE", "--profile-layers" if asked != "NONE" else ""
    if asked in ("NONE", "FULL_DECODE_ONLY") or not (why := why_no_prompts()):
        return asked, ""
    return ("NONE" if asked == "PIECEWISE" else "FULL_DECODE_ONLY"), why
