"""Requests with images behind a scheduler whose worker is a model's engine."""

from bench import COORDINATOR, DETOKENIZER, LIFE, Bench, limits
from media_models import LENGTH
from served_engines import Engines

from meshlm.protocol.edges.admit import Assign, EngineRequest
from meshlm.protocol.media import Media
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Handle, RequestId
from meshlm.runtime.process.events import Received

OUTPUT, STEP = 12, 24


def ask(bench: Bench, handle: int, prompt: list[int], media: Media | None) -> None:
    sampling = SamplingParams(max_tokens=OUTPUT, temperature=0.0)
    extras = () if media is None else (media,)
    work = EngineRequest(
        RequestId(f"r{handle}"), Handle(handle), pack_i32(prompt), sampling, arrival_s=float(handle), extras=extras
    )
    bench.event(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)))


def behind(engines: Engines) -> Bench:
    bench = Bench(limits(max_model_len=LENGTH, max_num_batched_tokens=STEP), 0, 0, model=engines)
    engines.cached = bench.directory._hashes
    return bench
