"""A worker's steps in a recording of `meshlm trace`: when each was launched, and when it was on the device. Owned by io.py."""

from meshlm.protocol.edges.step import StepPlan, StepResult
from meshlm.runtime.process.timeline import Timeline


class StepTimeline:
    """`launched` is called in the stepper's thread, `ended` in the completer's."""

    def __init__(self) -> None:
        self._done_ns = 0  # the end of the last step

    def launched(self, timeline: Timeline, plan: StepPlan, begin_ns: int) -> None:
        if timeline.on:
            timeline.note("launch", "stepper", begin_ns, flow=plan.planned_ns, facts=_facts(plan))

    def ended(self, timeline: Timeline, plan: StepPlan, result: StepResult) -> None:
        """The step on the device: by its own clock where it has one, behind the step before."""
        begin_ns = result.done_ns - result.gpu_ns if result.gpu_ns else max(result.launched_ns, self._done_ns)
        self._done_ns = result.done_ns
        if timeline.on:
            timeline.note("step", "device", begin_ns, result.done_ns, plan.planned_ns, _facts(plan))


def _facts(plan: StepPlan) -> dict[str, str | int]:
    return {"step": plan.step, "tokens": plan.num_tokens}
