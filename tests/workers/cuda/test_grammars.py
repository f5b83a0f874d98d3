"""Masks on the GPU: in mixed steps and decodes, in graphs and without, with two steps on their way, and nothing waits for the device
but for the tokens of the step before."""

import re
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.prompt_embeds import PromptEmbeds
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import ErrorKind, StepId

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from byte_vocabulary import EOS, byte_vocabulary, of_regex
from engine_driver import MODEL, Driver, engine, prompts_of

from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.output.grammars import GrammarRows, Grammars
from meshlm.workers.output.matchers import Matchers

pytestmark = pytest.mark.gpu
LENGTHS = [40, 333, 129, 17]
FORMS = {0: "[a-f]{5}[0-9]{6}", 1: "(one|two|six)(one|two|six)(one|two|six)", 3: "[x-z]{4}"}


@pytest.fixture(scope="module", params=["FULL", "NONE"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelEngine:
    folder: Path = tmp_path_factory.mktemp("model")
    found = engine(folder, cudagraph_mode=request.param, enable_prompt_embeds=True)
    found.extras.kind(GrammarRows).grammars = Grammars(Matchers(lambda: byte_vocabulary(int(str(MODEL["vocab_size"])))))
    return found


def params_of(row: int) -> SamplingParams:
    bias = {300 + n: 5.0 for n in range(20)} if row == 1 else {}  # more than kernels do
    return SamplingParams(temperature=0.8, seed=row, eos_token_ids=(EOS,), logit_bias=bias, logprobs=row - 1)


def news(made: ModelEngine, constrained: bool) -> list[NewRow]:
    driver = Driver(made, prompts_of(LENGTHS), SamplingParams())
    extras = {row: (of_regex(form),) for row, form in FORMS.items() if constrained}
    return [
        msgspec.structs.replace(new, sampling=params_of(new.row), extras=extras.get(new.row, ())) for new in driver._new
    ]


def plan(step: int, parts: dict[int, tuple[int, int, bool]], new_rows: list[NewRow]) -> StepPlan:
    """By row: start, count, whether it samples; decodes first."""
    order = sorted(parts, key=lambda row: parts[row][1] != 1)
    starts, counts = (np.array([parts[row][at] for row in order], np.int32) for at in (0, 1))
    samples = bytes(parts[row][2] for row in order)
    rows = np.array(order, np.int32).tobytes()
    all_sample = all(samples)
    sent = b"" if all_sample else samples
    return StepPlan(
        1, StepId(step), rows, starts.tobytes(), counts.tobytes(), sent, int(counts.sum()), new_rows=new_rows
    )


def outputs(made: ModelEngine, constrained: bool, decodes: int) -> list[list[int]]:
    """Prompts in chunks beside decodes, then decodes; a step is launched before the one before has been waited for."""
    fresh = news(made, constrained)
    plans = [
        plan(1, {3: (0, 17, True), 1: (0, 100, False)}, [fresh[3], fresh[1]]),
        plan(2, {3: (17, 1, True), 0: (0, 40, True), 1: (100, 233, True)}, [fresh[0]]),
        plan(3, {3: (18, 1, True), 0: (40, 1, True), 1: (333, 1, True), 2: (0, 129, True)}, [fresh[2]]),
    ]
    given = [2, 2, 1, 3]
    for step in range(decodes):
        at = {row: (LENGTHS[row] + given[row] - 1 + step, 1, True) for row in range(4)}
        plans.append(plan(4 + step, at, []))
    found: list[list[int]] = [[], [], [], []]
    pending: deque[tuple[StepPlan, object]] = deque()

    def take() -> None:
        one, launched = pending.popleft()
        result = launched.wait()  # type: ignore[attr-defined]
        assert not result.failed
        rows = np.frombuffer(one.rows, np.int32)
        samples = np.frombuffer(one.samples, np.uint8) > 0 if one.samples else np.ones(len(rows), np.bool_)
        tokens = np.frombuffer(result.token_ids, np.int32).tolist()
        for row, token in zip(rows[samples].tolist(), tokens, strict=True):
            found[row].append(token)

    for one in plans:
        torch.cuda.set_sync_debug_mode("error" if one.step > 5 else "default")
        try:
            pending.append((one, made.step(one, 0)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if len(pending) > 1:
            take()
    while pending:
        take()
    return found


def test_texts_keep_to_their_grammars_and_others_are_what_they_were(made: ModelEngine) -> None:
    made.reset()
    plain = outputs(made, False, 12)
    for _ in range(2):  # the second time with captured graphs
        made.reset()
        found = outputs(made, True, 12)
        for row, form in FORMS.items():
            end = found[row].index(EOS)
            assert re.fullmatch(form, bytes(found[row][:end]).decode())
            assert set(found[row][end:]) == {EOS}, "behind the end only ends may follow"
        same = sum(one == other for one, other in zip(plain[2], found[2], strict=True))
        assert same == len(plain[2])


def test_rows_that_no_token_can_be_chosen_for_fail_alone(made: ModelEngine) -> None:
    """By the kernels, in graphs and without (keys and values that are not numbers), and by torch (an allowlist that is banned): nothing
    waits for the device, steps that were launched already go on, and the neighbour has its tokens."""
    made.reset()
    fresh, vocab = news(made, False), int(str(MODEL["vocab_size"]))
    no_numbers = np.full(LENGTHS[3] * int(str(MODEL["hidden_size"])), 0x7FC0, np.uint16).tobytes()
    spoilt = msgspec.structs.replace(fresh[3], extras=(PromptEmbeds("bfloat16", ((0, LENGTHS[3]),), no_numbers),))
    nothing = SamplingParams(temperature=0.8, allowed_token_ids=(5,), bad_words_token_ids=((5,),), logprobs=1)
    banned = msgspec.structs.replace(fresh[0], sampling=nothing)
    plans = [plan(1, {row: (0, LENGTHS[row], True) for row in (3, 0, 2)}, [spoilt, banned, fresh[2]])]
    plans += [plan(2 + n, {row: (LENGTHS[row] + n, 1, True) for row in (3, 0, 2)}, []) for n in range(8)]
    launched = [made.step(plans[0], 0)]
    for one, behind in zip(plans, [*plans[1:], None], strict=True):
        launched += [made.step(behind, 0)] if behind is not None else []
        result = launched.pop(0).wait()
        assert {place: failed.kind for place, failed in result.failed.items()} == {
            0: ErrorKind.INTERNAL,
            1: ErrorKind.INVALID,
        }
        assert 0 <= np.frombuffer(result.token_ids, np.int32)[2] < vocab, one.step
    made.reset()
