"""The CUDA-graph dispatcher: the only place that decides whether a step is replayed, from which graph, and if not, why.

A graph is keyed by its padded numbers of tokens and requests. Uniform decodes have as many tokens as requests; graphs of mixed steps
take any composition of prompts, chunks and decodes that fits. A few are captured at the start, such that each step fits one; the others
in idle time, and in the middle of work when one is asked for again and again: capturing keeps the host for as long as launching the
step, and the GPU not at all. Each may have a second one, for steps whose decodes share prefixes, which is captured when such steps ask
for it again and again; until then they take the first. Attention of few requests is launched in other ways where contexts are short or
long, so these have graphs of their own (keys.py), mixed steps with long ones when they ask for them.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import structlog
import torch

from meshlm.workers.graphs.keys import ANY, HEAD, LONG, LONG_CONTEXT, LONG_LAUNCHES_S, SHORT, WHOLE, Key, StepTime
from meshlm.workers.rows.step_columns import Contexts

_log = structlog.get_logger()


class Recorder:
    """All graphs share one pool of memory: only one is replayed at a time. A pool ends with its last graph."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._cuda_stream: Any = None
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()  # of the pool
        self._broken: list[torch.cuda.CUDAGraph] = []  # whose captures could not be ended: an allocator knows them

    def record(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Captures a graph without torch.cuda.graph, which waits for the device, collects garbage and empties the allocator's cache."""
        make: Any = torch.cuda.Stream  # typed in some versions of torch only
        self._cuda_stream = self._cuda_stream or make()
        if self._pool is None or not self._graphs:  # torch takes no graph into a pool that has ended
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._cuda_stream):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                launch()
                graph.capture_end()
            except BaseException:
                self._break_off(graph)
                raise
        self._graphs.add(graph)
        return graph

    def forget(self) -> None:
        """All graphs are gone: the GPU has their memory back, which no capture could ask for while it lasts."""
        self._graphs.clear()
        torch.cuda.empty_cache()

    def _break_off(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that has failed: its stream must not stay in it.

        Where CUDA refuses, torch leaves its allocators in the midst of the capture. The GPU's must be told, else it frees nothing any
        more; the host's cannot be: it goes on asking the graph, and would refuse its pool."""
        try:
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # it was told
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            self._broken.append(graph)
            self._pool = self._cuda_stream = None


PATIENCE = 1  # steps that a mixed graph is missed by before it is captured in the middle of work
PATIENCE_DECODES = 16  # ... and that a larger graph does instead: of decodes,
PATIENCE_MIXED = 4  # and a mixed one, whose padding costs more
PATIENCE_SHARED = 8  # ... and that a graph without shared prefixes does
WIDEST = 2  # times the tokens of the graph that is missed


class Dispatcher:
    """`capture(key)` runs one step of that shape; what it launches becomes the graph."""

    def __init__(
        self,
        keys: list[Key],
        capture: Callable[[Key], None],
        agree: Callable[[bool], bool] | None = None,
        step_time: StepTime | None = None,
        most_prompts: int | None = None,
        long: Sequence[int] = (),
        short_context: int = 0,
    ) -> None:
        """agree: of a group, whose ranks must have the same graphs: whether a capture worked on all, told whether it did here.

        step_time: of this model, where contexts decide too. most_prompts: for which mixed graphs have room, where that is limited.
        long: numbers of requests of graphs for long contexts; none where those are no others. short_context: the longest of which
        there are graphs for short ones."""
        self._wanted = keys
        self._keep(keys)
        self.misses: Counter[str] = Counter()
        self.replays: Counter[str] = Counter()
        self._capture, self._agree, self._step_time = capture, agree, step_time
        self._most_prompts, self._long, self._short_context = most_prompts, long, short_context
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._refused: set[Key] = set()  # parts of steps that could not be captured
        self._missed: Counter[Key] = Counter()
        self._recorder = Recorder()
        self._reason = ""  # of the last capture that failed

    def find(
        self,
        num_tokens: int,
        num_requests: int,
        *,
        uniform: bool,
        halves: bool = False,
        contexts: Contexts | None = None,
        num_prompts: int = 0,
        shared: bool = False,
        drafts: bool = False,
        adapters: bool = False,
    ) -> Key | None:
        """The smallest graph that holds the step; None (and a counted miss, unless it is of halves) when there is none.

        shared: its decodes share prefixes. A graph without that does, too, as long as there is no other. adapters: some rows have one.
        A mixed graph has at least one request more than the step: lines of the head that sample nothing belong to it."""
        decodes, mixed = (
            [key for key in keys if key.adapters == adapters]
            for keys in (self._halved if halves else (self._drafts if drafts else self._decodes, self._mixed))
        )
        if uniform:
            fitting = [key for key in decodes if key.requests >= num_requests]
            if fitting:
                if shared and (key := self._for_shared(fitting)) is not None:
                    return key
                return self._for_short(self._there(fitting, PATIENCE_DECODES) or fitting[0], contexts)
        fitting = [key for key in mixed if key.tokens >= num_tokens and key.requests > num_requests]
        if fitting and contexts is not None and not shared and (key := self._for_long(fitting, num_requests, contexts)):
            return key
        if fitting and self._is_long(num_tokens, contexts):
            self.miss("long_context")
            return None
        if fitting and self._most_prompts is not None and num_prompts > self._most_prompts:
            self.miss("too_many_prompts")
            return None
        if fitting and shared and (key := self._for_shared(fitting)) is not None:
            return key
        if fitting:
            key = self._there(fitting, PATIENCE_MIXED)
            if key is None and self._missed[fitting[0]] > PATIENCE:
                return fitting[0]
            if key is None:  # it can as well be launched eagerly
                self.miss("not_captured")
            return key
        if halves:
            return None
        if not self.keys:
            self.miss("off")
        else:
            self.miss("too_many_decodes" if uniform else "too_many_tokens")
        return None

    def _is_long(self, num_tokens: int, contexts: Contexts | None) -> bool:
        """Whether long contexts make a mixed step so long that it is launched kernel by kernel, for the requests that it has."""
        if self._step_time is None or contexts is None or contexts.longest < LONG_CONTEXT:
            return False
        return self._step_time.of(num_tokens, contexts) > LONG_LAUNCHES_S

    def _there(self, fitting: list[Key], patience: int) -> Key | None:
        """The first, if it is captured or its turn has come; until then one not much larger that is captured, if there is any."""
        wanted = fitting[0]
        if wanted in self._graphs:
            return wanted
        self._missed[wanted] += 1
        if self._missed[wanted] > patience:
            return wanted
        return next((key for key in fitting if key in self._graphs and key.tokens <= WIDEST * wanted.tokens), None)

    def asks_for_contexts(self, num_requests: int, *, uniform: bool) -> bool:
        return not uniform or any(key.requests >= num_requests for key in self._short)

    def _for_short(self, key: Key, contexts: Contexts | None) -> Key:
        """The one for short contexts, if there is one and they are."""
        if contexts is None or contexts.longest > self._short_context:
            return key
        short = key._replace(contexts=SHORT)
        return short if short in self._graphs else key

    def _for_long(self, fitting: list[Key], num_requests: int, contexts: Contexts) -> Key | None:
        """The one for long contexts, if they are, and it is captured or its turn has come."""
        requests = next((most for most in self._long if most > num_requests), None)
        if requests is None or contexts.longest < LONG_CONTEXT:
            return None
        wanted = Key(fitting[0].tokens, requests, contexts=LONG, adapters=fitting[0].adapters)
        if wanted in self._graphs:
            return wanted
        self._missed[wanted] += 1
        return wanted if self._missed[wanted] > PATIENCE and wanted not in self._refused else None

    def _for_shared(self, fitting: list[Key]) -> Key | None:
        """The one for shared prefixes, among those that could be captured."""
        fitting = [key for key in (key._replace(shared=True) for key in fitting) if key not in self._refused]
        return self._there(fitting, PATIENCE_SHARED) if fitting else None

    def miss(self, reason: str) -> None:
        """Count a step that is launched kernel by kernel."""
        self.misses[reason] += 1

    def prepare(self, key: Key) -> None:
        """Have the graph of a step whose inputs are in place, if there is memory for it and it can be captured. In a group all do
        so at once, and none may do without."""
        if key in self._graphs or key in self._refused:
            return
        self.misses["captured_now"] += 1
        try:
            self.make(key)
        except torch.OutOfMemoryError as error:
            if self._agree is not None:
                raise
            self.miss("no_memory")
            self._refused.add(key)
            self.abandon(error)

    def replay(self, key: Key) -> None:
        graph = self._graphs.get(key)
        if graph is None:
            self._capture(key)  # the same kernels, launched one by one
            return
        if key.part != HEAD:
            more = "_shared" if key.shared else "_long" if key.contexts == LONG else "_drafts" if key.drafts else ""
            more += "_adapters" if key.adapters else ""
            self.replays[("decode" if key.uniform else "mixed") + more] += 1
        graph.replay()

    def first(self, *, everything: bool = False) -> list[Key]:
        """The keys to capture at the start: those from which no step is far, or all.

        Those are of powers of two, and the longest of decodes and for each number of requests. Large ones first: the others fit in
        their memory."""
        some = {key for key in self.keys if key.tokens & (key.tokens - 1) == 0}
        some.update({(key.requests, key.adapters): key for key in self._mixed}.values())
        for decodes in (self._decodes, self._drafts):
            some.update({key.adapters: key for key in decodes}.values())
        return sorted(self.keys if everything else some, key=lambda key: (not key.uniform, -key.tokens))

    def make(self, key: Key) -> None:
        """Capture its graph; if that fails, its steps do without from now on.

        Raises when there is no memory, and what a GPU says on which nothing works any more."""
        if not any(made.kind == key.kind for made in self._graphs):
            self._rehearse(key)  # the first of its kind: what is loaded or allocated for all
        graph = self._attempt(key)
        if graph is None and self._rehearse(key):  # more is to be loaded, and may not be while capturing
            torch.cuda.synchronize()
            graph = self._attempt(key)
            if graph is not None:
                self.misses["rehearsed"] += 1
        if graph is None and (key.part != WHOLE or key.shared or key.contexts):  # another way is there
            self._refused.add(key)
        elif graph is None:
            self._drop(key)
        else:
            self._graphs[key] = graph

    def background(self) -> None:
        """Capture one more graph: decodes first, the largest first (the others fit in its memory)."""
        for keys in (self._decodes, self._short, self._drafts, self._mixed, *self._halved):
            for key in reversed(keys):
                if key not in self._graphs:
                    self.make(key)
                    return

    def forget(self) -> None:
        """All that are captured, and which could not be: a new group's ranks begin alike. None is replayed now."""
        self._graphs.clear()
        self._recorder.forget()
        self._missed.clear()
        self._refused.clear()
        self._keep(self._wanted)

    def abandon(self, error: torch.OutOfMemoryError) -> None:
        """Capture no more: steps of other sizes are launched kernel by kernel."""
        _log.warning("no memory for more CUDA graphs", captured=len(self._graphs), error=str(error)[:100])
        self._keep([key for key in self.keys if key in self._graphs])

    def _keep(self, keys: list[Key]) -> None:
        self.keys = keys
        self._short = [key for key in keys if key.contexts == SHORT]
        whole, halved = ([key for key in keys if key.halves == are and key.contexts == ANY] for are in (False, True))
        self._decodes, self._drafts = (
            [key for key in whole if key.uniform and key.drafts == are] for are in (False, True)
        )
        self._mixed = [key for key in whole if not key.uniform]
        self._halved = ([key for key in halved if key.uniform], [key for key in halved if not key.uniform])

    @property
    def complete(self) -> bool:
        return all(key in self._graphs for key in self.keys)

    def _rehearse(self, key: Key) -> bool:
        """Launch the step kernel by kernel. Whether that worked; a group's ranks are in the midst of it together, and end."""
        try:
            self._capture(key)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a driver, a library or a compiler; no graph is worth the process
            if self._agree is not None:
                raise
            self._failed(error)
            return False
        return True

    def _attempt(self, key: Key) -> torch.cuda.CUDAGraph | None:
        """Captures the key's graph; None when it could not be captured, here or on another rank of the group."""
        graph, self._reason = None, "it failed on another rank"
        try:
            graph = self._recorder.record(lambda: self._capture(key))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a driver, a library or a compiler; no graph is worth the process
            self._failed(error)
        worked = graph is not None
        return graph if self._agree is None or self._agree(worked) else None

    def _failed(self, error: Exception) -> None:
        """Raises if the GPU itself has failed (an illegal access, say): every later call does then, and this process must end."""
        torch.cuda.synchronize()
        self._reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"

    def _drop(self, key: Key) -> None:
        _log.warning(
            "a CUDA graph cannot be captured: its steps take a larger one, or are launched kernel by kernel",
            tokens=key.tokens,
            requests=key.requests,
            reason=self._reason,
        )
        self.misses["capture_failed"] += 1
        self._keep([kept for kept in self.keys if kept != key])


class Captures:
    """`clear` makes a step of padding of the inputs, so that what is captured computes nothing that counts."""

    def __init__(self, graphs: Dispatcher, clear: Callable[[], None]) -> None:
        self._graphs, self._clear = graphs, clear

    def next(self) -> None:
        """One more."""
        self._clear()
        with torch.inference_mode():
            self._graphs.background()

    def in_idle_time(self) -> None:
        """One more, if there is memory for it."""
        try:
            self.next()
        except torch.OutOfMemoryError as error:
            self._graphs.abandon(error)

    def all(self, report: Callable[[str, int, int, str], None]) -> None:
        """All ranks of a group must have the same graphs: none may do without one for want of memory."""
        total = len(self._graphs.keys)
        for done in range(total):
            self.next()
            report("CUDA graphs", done + 1, total, "")

    def together(self, *, everything: bool) -> None:
        """The first ones of ranks that step together; they have the others when their steps ask for them, all at once too."""
        for key in self._graphs.first(everything=everything):
            self._clear()
            self._graphs.make(key)

    def first(self, report: Callable[[str, int, int, str], None], *, everything: bool) -> None:
        """Captures the graphs that no request should have to wait for; all of them where requests leave no idle time."""
        first = self._graphs.first(everything=everything)
        self._clear()
        try:
            with torch.inference_mode():
                for done, key in enumerate(first, 1):
                    self._graphs.make(key)
                    report("CUDA graphs", done, len(first), "")
        except torch.OutOfMemoryError as error:
            self._graphs.abandon(error)
