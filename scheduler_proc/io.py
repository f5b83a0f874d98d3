"""The scheduler's links, timers and clock."""

import os
import time
from pathlib import Path

from msgspec import Struct

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.admit import Assign
from meshlm.protocol.edges.kv import PagesMoved, PagesOpened
from meshlm.protocol.edges.step import StepFailed, StepPlan, StepResult
from meshlm.protocol.edges.token import TokenDeltas
from meshlm.protocol.wire.ids import Identity, Incarnation, Role
from meshlm.runtime.errors import LinkDown, MessageTooLong, ProcessFatal
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.process import in_hand
from meshlm.runtime.process.events import Event, PeerLost, PeerUp, Received, Send, Tick
from meshlm.runtime.process.process import App
from meshlm.runtime.process.readable import about, requests
from meshlm.scheduler_proc import batching_counts
from meshlm.scheduler_proc.core import Scheduler
from meshlm.scheduler_proc.estimates import Estimates
from meshlm.scheduler_proc.kv_publisher import KVPublisher, Place, local_sockets
from meshlm.scheduler_proc.limits import Limits

TICK_S = 1.0


def limits_of(config: MeshConfig, index: int) -> Limits:
    """The limits that the configuration gives dp rank `index`."""
    resolved, parallel = config.resolved, config.parallel
    if resolved is None:
        raise ProcessFatal("the configuration is not resolved")
    one_step = resolved.spec.encoder_only  # its prompts are computed in one step, and nothing of them is kept
    observability = config.observability
    return Limits(
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_num_encoder_input_tokens=config.scheduler.max_num_encoder_input_tokens or 0,
        async_depth=config.scheduler.async_depth,
        chunked_prefill=config.scheduler.enable_chunked_prefill and not one_step,
        even_prefill=config.scheduler.prefill_pace == "even",
        max_itl_s=None if config.scheduler.max_itl_ms is None else config.scheduler.max_itl_ms / 1e3,
        prefix_caching=config.cache.enable_prefix_caching and not one_step,
        by_priority=config.scheduler.scheduling_policy == "priority",
        num_workers=parallel.workers_per_rank,
        first_worker=index * parallel.workers_per_rank,
        lockstep=config.lockstep,
        sleep_mode=config.worker.enable_sleep_mode,
        kv_metrics_sample=observability.kv_cache_metrics_sample if observability.kv_cache_metrics else 0.0,
        kv_events=config.kv_events.enabled,
        counts_drafts=config.speculative.per_request_spec_decode_metrics != "none",
        max_loras=config.adapters.max_loras,
        num_stages=parallel.pipeline_parallel_size,
        kv_transfer=config.kv_transfer,
        secret=os.urandom(16),
        dp_rank=index + (parallel.data_parallel_rank or 0),
    )


class SchedulerApp(App):
    """A scheduler as a process: frontends end first and wait for their requests, so it has nothing left to drain."""

    def __init__(self) -> None:
        self._mesh: Mesh | None = None
        self._core: Scheduler | None = None
        self._early: list[Event] = []  # what peers said before start() ran
        self._said_serving = False
        self._publisher: KVPublisher | None = None  # of the prefix cache's events

    async def start(self, mesh: Mesh) -> dict[str, str]:
        self._mesh = mesh
        self._core = Scheduler(limits_of(mesh.config, mesh.identity.index))
        if mesh.config.observability.enable_mfu_metrics and mesh.config.resolved is not None:
            kv_bytes = 1.0 if mesh.config.cache.kv_cache_dtype != "auto" else 0.0
            devices = mesh.config.parallel.workers_per_rank
            self._core.estimates = Estimates(mesh.config.resolved.spec, devices, kv_bytes)
        facts = self._publish(mesh, self._core.limits.dp_rank)
        for event in self._early:
            self._do(event)
        self._tick()
        self.flush()
        return facts

    def _publish(self, mesh: Mesh, rank: int) -> dict[str, str]:
        """Opens the sockets for the prefix cache's events, where they are wanted."""
        config, me = mesh.config, mesh.identity
        if not config.kv_events.enabled:
            return {}
        local = local_sockets(Path(config.run.run_dir), me.index, mesh.incarnation) if config.server.grpc else None
        self._publisher = KVPublisher(config.kv_events, Place(rank, local), time.time)
        return {"KV events": self._publisher.address}

    def _tick(self) -> None:
        assert self._mesh is not None
        self._mesh.call_later(TICK_S, self._tick)  # first: one that fails is not the last
        self._do(Tick(time.time()))

    def _do(self, event: Event) -> None:
        if self._core is None:
            self._early.append(event)
            return
        timeline = self._mesh.timeline if self._mesh is not None else None
        if (
            timeline is None
            or not timeline.on
            or not (isinstance(event, Received) and isinstance(event.message, StepResult))
        ):
            self._send(self._core.handle(event, time.monotonic()))
            return
        begin_ns = time.monotonic_ns()
        flow = self._core.inflight[0].planned_ns if self._core.inflight else 0
        self._send(self._core.handle(event, time.monotonic()))
        timeline.note("result", "loop", begin_ns, flow=flow, facts={"step": event.message.step})

    def _send(self, effects: list[Send]) -> None:
        assert self._mesh is not None
        for effect in effects:
            try:
                self._mesh.send(effect.to, effect.message)
            except LinkDown:
                # A lost peer's PeerLost follows; the coordinator is told again when it is back.
                self._mesh.log.debug("not delivered", to=str(effect.to), **about(effect.message))
            except MessageTooLong as error:
                self._too_long(effect, str(error))

    def _too_long(self, effect: Send, text: str) -> None:
        """No frame holds this message of ours: the requests that it is about end with an error."""
        assert self._mesh is not None and self._core is not None  # noqa: PT018
        match effect.message:
            case TokenDeltas():
                self._send(self._core.table.too_long(effect.to, effect.message, text))
            case StepPlan():  # rows and blocks that it was to bring would be missing: begin anew with the workers
                self._mesh.drop(effect.to, text)

    def _say_lost(self, reason: str, num_steps: int | None = None) -> None:
        """So many of the oldest steps in flight, or all, are lost: whose they were. The worker's own lines know rows alone."""
        if self._core is None or self._mesh is None or not self._core.inflight:
            return
        steps = list(self._core.inflight)[:num_steps]
        ids = dict.fromkeys(request.work.request_id for step in steps for request in step.batch)
        open_ids = [request_id for request_id in ids if request_id in self._core.requests]
        self._mesh.log.warning(
            "steps are lost", steps=[step.step for step in steps], reason=reason, **requests(open_ids)
        )

    def on_message(self, peer: Identity, message: Struct) -> None:
        assert self._mesh is not None or self._core is None
        if isinstance(message, StepFailed) and self._core is not None and message.session == self._core.session:
            self._say_lost(message.message, 1)
        if isinstance(message, PagesMoved | PagesOpened) and self._mesh is not None:
            self._say_pages(peer, message)
        incarnation = self._mesh.incarnation_of(peer) if self._mesh is not None else Incarnation(0)
        name = message.work.request_id if isinstance(message, Assign) else ""
        in_hand.holding(name, self._do, Received(peer, incarnation, message))

    def _say_pages(self, peer: Identity, message: PagesMoved | PagesOpened) -> None:
        """Pages that did not move: whatever was to be loaded is computed, and nothing waits for it."""
        assert self._mesh is not None
        match message:
            case PagesOpened(failed=failed) if failed:
                self._mesh.log.warning("the store keeps no KV pages of this rank", store=str(peer), reason=failed)
            case PagesMoved(failed=failed, message=text) if failed:
                self._mesh.log.warning(
                    "KV pages were not copied", worker=str(peer), pages=len(failed) // 4, reason=text
                )

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        self._do(PeerUp(peer, incarnation))

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        if peer.role is Role.WORKER:
            self._say_lost(f"{peer}: {reason}")
        self._do(PeerLost(peer, incarnation))

    def flush(self) -> None:
        """All messages of this turn are handled: sends as many steps as may be in flight, then what the coordinator should know."""
        if self._core is None:
            return
        while effects := self._core.plan(now_ns := time.monotonic_ns()):
            batching_counts.planned(self._core.batching.counts, time.monotonic_ns() - now_ns)
            self._note_plan(effects[0].message, now_ns)
            self._send(effects)
        if (transfers := self._core.transfers) is not None and transfers.warnings:
            assert self._mesh is not None
            for warning in transfers.warnings:
                self._mesh.log.warning("KV is not moved", reason=warning)
            transfers.warnings.clear()
        self._send(self._core.report())
        if self._publisher is not None and (events := self._core.kv_events()):
            self._publisher.publish(events)
        if (
            self._core.serving is not self._said_serving
        ):  # at once: in a mesh that is ready nobody is observability waiting
            self._said_serving = self._core.serving
            assert self._mesh is not None
            self._mesh.say_beat()

    def _note_plan(self, plan: Struct, begin_ns: int) -> None:
        timeline = self._mesh.timeline if self._mesh is not None else None
        if timeline is not None and timeline.on and isinstance(plan, StepPlan):
            facts: dict[str, str | int] = {
                "step": plan.step,
                "tokens": plan.num_tokens,
                "requests": len(plan.rows) // 4,
            }
            timeline.note("plan", "loop", begin_ns, flow=begin_ns, facts=facts)

    async def stop(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def beat(self) -> tuple[int, str]:
        core = self._core
        if core is None:
            return 0, "starting"
        if not core.serving:
            return core.num_steps, "its workers sleep" if core.workers.asleep else "waiting for its workers"
        return core.num_steps, f"{len(core.requests)} requests" if core.requests else "idle"

    def num_requests(self) -> int:
        return len(self._core.requests) if self._core is not None else 0
