"""A device that knows what the pages of a KV cache hold, for any kinds of attention."""

from itertools import count
from typing import Any

from hypothesis import strategies as st

from meshlm.protocol.edges.admit import EngineRequest
from meshlm.protocol.kv import (
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    KVSpec,
    Latent,
    RecurrentState,
    SlidingWindow,
)
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Handle, Identity, Incarnation, RequestId, Role
from meshlm.scheduler_proc.kv.cache import KVCache
from meshlm.scheduler_proc.request import Request

FULL = FullAttention()
names = count()
BLOCK = 4


def request_of(tokens: list[int], salt: str = "", max_tokens: int = 100) -> Request:
    name = next(names)
    sampling = SamplingParams(max_tokens=max_tokens)
    work = EngineRequest(RequestId(f"r{name}"), Handle(name), pack_i32(tokens), sampling, cache_salt=salt)
    return Request(work, Identity(Role.DETOKENIZER), Incarnation(1), 1000)


class Device:
    """What the pages hold: of each slot, the group, the salt and all tokens up to its own. It computes as soon as it is told."""

    def __init__(self, specs: tuple[KVSpec, ...], num_pages: int) -> None:
        self.specs = specs or (FULL,)
        self.kv = KVCache(num_pages, BLOCK, specs, step_tokens=64)
        self.slots: dict[tuple[int, int], object] = {}
        self.running: list[Request] = []

    def _slot(self, request: Request, group: int, position: int) -> tuple[int, int]:
        return request.blocks[position // BLOCK * len(self.specs) + group], position % BLOCK

    def compute(self, request: Request, num_tokens: int) -> None:
        """Its next tokens, each from what its attention sees in the pages."""
        self.goes_on(request)
        self.encodes(request)
        for position in range(request.num_computed, request.num_computed + num_tokens):
            for group, spec in enumerate(self.specs):
                if isinstance(spec, CrossAttention):
                    continue
                known = (group, request.work.cache_salt, tuple(request.tokens[: position + 1]))
                self.slots[self._slot(request, group, position)] = known
        for position in (request.num_computed, request.num_computed + num_tokens - 1):
            self.sees(request, position)
        request.num_computed += num_tokens

    def encodes(self, request: Request) -> None:
        """The first step of a request fills its page, and all later ones find that there, wherever their tokens stand."""
        for group, spec in enumerate(self.specs):
            if isinstance(spec, CrossAttention):
                pages = set(request.blocks[group :: len(self.specs)])
                assert len(pages) == 1
                page = pages.pop()
                if not request.num_computed:
                    self.slots.update(dict.fromkeys(((page, at) for at in range(BLOCK)), request))
                assert all(self.slots[page, at] is request for at in range(BLOCK)), "another's audio"

    def goes_on(self, request: Request) -> None:
        """States are read before the step writes any."""
        for group, spec in enumerate(self.specs):
            if isinstance(spec, RecurrentState) and request.num_computed:
                known = (group, request.work.cache_salt, tuple(request.tokens[: request.num_computed]))
                assert self.slots[self._slot(request, group, request.num_computed - 1)] == known, (
                    f"{spec}: a wrong state"
                )

    def sees(self, request: Request, position: int) -> None:
        for group, spec in enumerate(self.specs):
            if isinstance(spec, RecurrentState | CrossAttention):
                continue
            first = max(0, position - spec.window + 1) if isinstance(spec, SlidingWindow) else 0
            if isinstance(spec, ChunkedAttention):
                first = position // spec.chunk * spec.chunk
            for key in range(first, position):
                known = (group, request.work.cache_salt, tuple(request.tokens[: key + 1]))
                assert self.slots[self._slot(request, group, key)] == known, f"{spec}: {position} sees a wrong {key}"

    def start(self, tokens: list[int], salt: str = "", chunk: int = 1000) -> Request | None:
        request = request_of(tokens, salt)
        hit = self.kv.match(request)
        assert hit < len(tokens)
        chunk = min(chunk, len(tokens) - hit)
        if self.kv.grow(request, hit + chunk, self.running) is None:
            self.kv.free(request)
            return None
        request.num_computed = hit
        self.running.append(request)
        self.compute(request, chunk)
        self.kv.cache_full(request, request.num_computed)
        return request

    def go_on(self, request: Request, num_tokens: int, num_known: int) -> bool:
        if self.kv.grow(request, request.num_computed + num_tokens, self.running) is None:
            return False
        self.compute(request, num_tokens)
        self.kv.cache_full(request, min(num_known, request.num_computed))
        return True

    def end(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.free(request)

    def check(self) -> None:
        self.kv.check(self.running)


GROUPS: tuple[tuple[KVSpec, ...], ...] = (
    (),
    (Latent(8, 2),),
    (SlidingWindow(5),),
    (FULL, SlidingWindow(9)),
    (SlidingWindow(1), FULL),
    (FULL, SlidingWindow(6), SlidingWindow(6)),
    (FULL, SlidingWindow(3), SlidingWindow(10)),
    (FULL, ChunkedAttention(8)),
    (FULL, ChunkedAttention(6), ChunkedAttention(6), ChunkedAttention(3)),
    (ChunkedAttention(4),),
    (FULL, SlidingWindow(6), ChunkedAttention(12), RecurrentState("align")),
    (RecurrentState("none"),),
    (RecurrentState("align"),),
    (RecurrentState("all"), RecurrentState("all")),
    (FULL, RecurrentState("align", 2), RecurrentState("align", 2)),
    (FULL, RecurrentState("all", 2)),
    (FULL, RecurrentState("none")),
    (FULL, SlidingWindow(6), RecurrentState("align"), RecurrentState("align")),
    (FULL, SlidingWindow(6), RecurrentState("all", 3)),
    (FULL, CrossAttention(3)),
    (FULL, SlidingWindow(6), CrossAttention(4), CrossAttention(4)),
)


def take_turn(device: Device, draw: Any, turn: str, texts: list[list[int]]) -> None:
    """Something that a scheduler does with its cache, as `draw` says: texts that begin like earlier ones start, go on, end."""
    match turn:
        case "start":
            text = draw(st.sampled_from(texts))[: draw(st.integers(0, 40))]
            texts.append(text + draw(st.lists(st.integers(0, 2), min_size=1, max_size=25)))
            device.start(texts[-1], draw(st.sampled_from(["", "", "s"])), draw(st.integers(1, 60)))
        case "go on" if device.running:
            request = draw(st.sampled_from(device.running))
            left = len(request.tokens) - request.num_computed
            if not left:
                request.tokens.extend([draw(st.integers(0, 2))] * draw(st.integers(1, 6)))
                left = len(request.tokens) - request.num_computed
            device.go_on(request, draw(st.integers(1, left)), draw(st.integers(0, len(request.tokens))))
        case "end" if device.running:
            device.end(draw(st.sampled_from(device.running)))
        case "reset" if draw(st.integers(0, 4)) == 0:
            device.kv.reset_prefix_cache(device.running)
