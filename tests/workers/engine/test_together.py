"""Engines whose ranks step together: one agreement a step, an idle rank steps along, and nobody waits for one that is gone."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import tokenizers
import torch
from cpu_steps import MODEL, OUTPUT, PROMPTS, alone, new, step, tokens_of

from meshlm.protocol.config import ExpertConfig
from meshlm.protocol.edges.step import StepPlan
from meshlm.protocol.lockstep import StepAgreement, StepGroup
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Epoch, StepId
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.distributed.expert_group import ExpertGroup
from meshlm.workers.distributed.lockstep import SocketExchange, StepAborted
from meshlm.workers.distributed.placement import WorkerPlacement
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.make import make_engine
from meshlm.workers.engine.together import Together

LIMIT_S = 30
GREEDY = SamplingParams(temperature=0.0, seed=1)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ModelEngine]]:
    """Two engines of one dense model: what they agree on is the same for models with experts."""
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    values: dict[str, object] = {"model": str(folder), "device": "cpu", "load_format": "dummy", "dtype": "float32"}
    values |= {"max_model_len": 128, "max_num_seqs": 4, "cpu_threads": 1}
    config = resolve.resolve(flags.build(values, None))
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    engines = []
    for rank in range(2):
        placement = WorkerPlacement(data_parallel=(rank, 2))
        engine = make_engine(config, lambda *progress: None, placement)
        engine.together = Together(placement.experts(engine.device), config.experts)
        engines.append(engine)
    yield engines
    for engine in engines:
        engine.join(None)
    torch.set_grad_enabled(grad)
    torch.set_num_threads(threads)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def both(pool: ThreadPoolExecutor, what: list[Callable[[], object]]) -> list[object]:
    futures: list[Future[object]] = [pool.submit(one) for one in what]
    return [future.result(LIMIT_S) for future in futures]


def join(ranks: list[ModelEngine], folder: Path, pool: ThreadPoolExecutor, epoch: int = 1) -> list[SocketExchange]:
    exchanges = [SocketExchange(str(folder), StepGroup(Epoch(epoch), 2), member) for member in range(2)]
    for engine in ranks:
        engine.reset()
    both(pool, [lambda e=e, x=x: e.join(x) for e, x in zip(ranks, exchanges, strict=True)])  # type: ignore[misc]
    return exchanges


def empty(engine: ModelEngine) -> list[int]:
    return tokens_of(engine.step(StepPlan(1, StepId(1), b"", b"", b"", b"", 0), 0).wait())


def decode(engine: ModelEngine, prompt: list[int]) -> list[int]:
    """Greedy tokens, a step each."""
    tokens = tokens_of(step(engine, [(0, 0, len(prompt), True)], [new(0, prompt, GREEDY)]))
    while len(tokens) < OUTPUT:
        tokens += tokens_of(step(engine, [(0, len(prompt) + len(tokens) - 1, 1, True)], []))
    return tokens


def test_an_idle_rank_steps_along(ranks: list[ModelEngine], tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    for engine in ranks:
        engine.join(None)
    expected = alone(ranks[0], PROMPTS[1], GREEDY)
    join(ranks, tmp_path, pool)
    idle: Callable[[], object] = lambda: [empty(ranks[1]) for _ in range(OUTPUT)]  # noqa: E731
    found, nothing = both(pool, [lambda: decode(ranks[0], PROMPTS[1]), idle])
    assert found == expected
    assert nothing == [[]] * OUTPUT
    assert ranks[1].together is not None
    assert ranks[1].together.experts.num_tokens == 1, "as many as the other rank's last step had"


def test_a_rank_that_fails_in_the_middle_lets_no_other_wait(
    ranks: list[ModelEngine], tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(ranks, tmp_path, pool)

    def fail(*_: object) -> None:
        raise RuntimeError("out of order")

    with monkeypatch.context() as patched:
        patched.setattr(ranks[0].compute, "eager", fail)
        with pytest.raises(RuntimeError, match="out of order"):
            both(pool, [lambda: decode(ranks[0], PROMPTS[0]), lambda: empty(ranks[1])])
    with pytest.raises(StepAborted):
        empty(ranks[1])
    join(ranks, tmp_path, pool, epoch=2)
    found, nothing = both(pool, [lambda: empty(ranks[0]), lambda: empty(ranks[1])])
    assert found == nothing == [], "they have met again"


def test_a_group_that_is_made_anew_before_all_have_come(
    ranks: list[ModelEngine], tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    alone_here = SocketExchange(str(tmp_path), StepGroup(Epoch(5), 2), 0)
    waiting = pool.submit(ranks[0].join, alone_here)
    alone_here.abort()
    with pytest.raises(StepAborted):
        waiting.result(LIMIT_S)
    with pytest.raises(StepAborted):
        empty(ranks[0])
    join(ranks, tmp_path, pool, epoch=6)
    assert both(pool, [lambda: empty(ranks[0]), lambda: empty(ranks[1])]) == [[], []]


def test_halves_that_were_measured_to_be_faster_are_the_default() -> None:
    """Of prompts that are written into the memory of three other GPUs at least."""
    written = ExpertConfig(enable_dbo=True, all2all_backend="peer_memory")
    for size, config, halved in (
        (4, written, True),
        (8, written, True),
        (2, written, False),
        (4, ExpertConfig(enable_dbo=True), False),
        (4, ExpertConfig(all2all_backend="peer_memory"), False),
    ):
        together = Together(ExpertGroup(0, size, "0", torch.device("cpu")), config)
        assert together.may_halve(2048, uniform=False) is halved, (size, config)
        assert not together.may_halve(2047, uniform=False)
        assert not together.may_halve(2048, uniform=True)
    given = ExpertConfig(enable_dbo=True, all2all_backend="peer_memory", dbo_prefill_token_threshold=8192)
    assert not Together(ExpertGroup(0, 4, "0", torch.device("cpu")), given).may_halve(4096, uniform=False)


class Others:
    """In the place of a StepExchange: what all ranks agree on."""

    def __init__(self, **said: object) -> None:
        self.said = said

    def agree(self, own: StepAgreement) -> StepAgreement:
        return msgspec.structs.replace(own, **self.said)


class Graphs:
    def find(self, *size: int, uniform: bool, halves: bool = False) -> None:
        return None


@pytest.mark.parametrize(
    ("num_tokens", "across", "said", "reason"),
    [
        (4, False, {}, "few_tokens"),
        (64, True, {}, "reads_across"),
        (64, False, {"micro_batches": False}, "other_rank"),
        (64, False, {"fewest_tokens": 1}, "uneven_ranks"),
        (64, False, {}, ""),
    ],
)
def test_why_a_step_is_not_halved_is_counted(
    num_tokens: int, across: bool, said: dict[str, object], reason: str
) -> None:
    config = ExpertConfig(enable_dbo=True, dbo_prefill_token_threshold=16, dbo_decode_token_threshold=16)
    together = Together(ExpertGroup(0, 2, "0", torch.device("cpu")), config)
    together._exchange = Others(**said)  # type: ignore[assignment]
    columns = SimpleNamespace(t=num_tokens, n=1, uniform=False)
    course = together.execution(columns, Graphs(), graph=False, across=across)  # type: ignore[arg-type]
    assert bool(course.cut) == (not reason)
    assert dict(together.whole) == ({reason: 1} if reason else {})
    assert dict(together.halved) == ({} if reason else {"mixed": 1})
