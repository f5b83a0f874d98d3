"""What a decode step of one plain row on a CPU calls: nothing of a kind that the row does not have, and little of the rest."""

import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import msgspec
import numpy as np
import pytest
import tokenizers
from cpu_steps import LENGTH, MODEL, PROMPTS, new, step, tokens_of

import meshlm
from meshlm.protocol.edges.step import StepPlan, StepResult
from meshlm.protocol.pool import Pool, PoolKind
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import StepId
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.make import make_engine

MOST_CALLS, MOST_FILES = 60, 16
OWN = str(Path(str(meshlm.__file__)).resolve().parents[2])
OF_KINDS = (
    "grammars",
    "matchers",
    "pooler",
    "pooled_heads",
    "prompt_inputs",
    "prompt_results",
    "logprobs",
    "processors",
)
OF_NAMES = ("BannedWords", "banned_words", "apply_mask", "of_tokens")  # of kinds, in modules that every step calls


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> ModelEngine:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    values: dict[str, object] = {"model": str(folder), "device": "cpu", "load_format": "dummy", "dtype": "float32"}
    values |= {"max_model_len": LENGTH, "max_num_seqs": 4, "cpu_threads": 1}
    return make_engine(resolve.resolve(flags.build(values, None)), lambda *progress: None)


def decode(row: int, start: int) -> StepPlan:
    rows, starts = np.array([row], np.int32).tobytes(), np.array([start], np.int32).tobytes()
    return StepPlan(1, StepId(2), rows, starts, b"", b"", 1)


def traced(made: ModelEngine, plan: StepPlan) -> tuple[StepResult, Counter[Path]]:
    """The step's result, and the calls into each of our files."""
    calls = Counter[Path]()

    def count(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_absolute():
            path = path.resolve()
            if path.is_relative_to(OWN) and "site-packages" not in path.parts:
                name = frame.f_code.co_qualname.partition(".")[0]
                calls[path.relative_to(OWN) / name if name in OF_NAMES else path.relative_to(OWN)] += 1

    sys.setprofile(count)
    try:
        result = made.step(plan, 0).wait()
    finally:
        sys.setprofile(None)
    return result, calls


def begin(made: ModelEngine) -> int:
    """Row 1 begins, which has nothing but tokens; how many it has."""
    made.reset()
    prompt = PROMPTS[0]
    step(made, [(1, 0, len(prompt), True)], [new(1, prompt, SamplingParams(temperature=0.0))])
    return len(prompt)


def of_kinds(calls: Counter[Path]) -> list[str]:
    return [str(path) for path in calls if path.stem in (*OF_KINDS, *OF_NAMES)]


def test_a_decode_of_a_plain_row(made: ModelEngine) -> None:
    result, calls = traced(made, decode(1, begin(made)))
    assert len(tokens_of(result)) == 1
    assert not of_kinds(calls)
    told = "\n".join(f"{number:3} {path}" for path, number in calls.most_common())
    assert sum(calls.values()) <= MOST_CALLS, f"{sum(calls.values())} calls:\n{told}"
    assert len(calls) <= MOST_FILES, f"{len(calls)} files:\n{told}"


def test_what_rows_of_other_steps_have_is_not_called(made: ModelEngine) -> None:
    """A row that wants a vector waits for the rest of its prompt; in its own step its kind is called, and no other."""
    start = begin(made)
    pooled = msgspec.structs.replace(new(2, PROMPTS[1], SamplingParams()), extras=(Pool(PoolKind.MEAN),))
    step(made, [(2, 0, 5, False)], [pooled])
    assert not of_kinds(traced(made, decode(1, start))[1])
    rest = np.array([5], np.int32).tobytes(), np.array([len(PROMPTS[1]) - 5], np.int32).tobytes()
    plan = StepPlan(1, StepId(3), np.array([2], np.int32).tobytes(), *rest, b"\x00", len(PROMPTS[1]) - 5)
    result, calls = traced(made, plan)
    assert list(result.pooled) == [0]
    assert {Path(path).stem for path in of_kinds(calls)} == {"prompt_results", "pooler", "logprobs"}
