"""Which --cudagraph-mode a worker uses: what was asked, as far as the model and the backend allow it. Pure; used by the kit."""

from meshlm.protocol.config.engine import WorkerConfig


def mode_of(worker: WorkerConfig, *, states: bool) -> tuple[str, str]:
    """The mode and, where it is not the one that was asked for, why. states: the model has recurrent states.

    The pieces of prompts of such a model are made by the host (workers/states), so graphs hold its decodes alone.
    """
    asked = worker.cudagraph_mode
    if worker.enforce_eager:
        return "NONE", "--enforce-eager" if asked != "NONE" else ""
    if worker.profile_layers:
        return "NONE", "--profile-layers" if asked != "NONE" else ""
    if not states or asked in ("NONE", "FULL_DECODE_ONLY"):
        return asked, ""
    why = "prompts of a model with recurrent states are launched kernel by kernel"
    return ("NONE" if asked == "PIECEWISE" else "FULL_DECODE_ONLY"), why
