"""A Pool's vector is transformers' hidden state of the prompt's last token, whatever its chunks and neighbours."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from small_models import SMALL

from meshlm.protocol.ids import Row, StepId
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.step_edge import NewRow, StepPlan
from meshlm.protocol.tasks import GENERATE, Pool, PoolKind, Task
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.make import make_engine

BLOCK = 16
LAST = Pool(PoolKind.LAST)


def i32(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def engine(folder: Path) -> ModelEngine:
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    values: dict[str, object] = {
        "model": str(folder), "device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4,
        "kv_cache_memory": 1 << 24,
    }  # fmt: skip
    return make_engine(resolve.resolve(flags.build(values, None)), lambda *news: None)


def row(number: int, prompt: list[int], task: Task) -> NewRow:
    return NewRow(Row(number), i32(*prompt), len(prompt), i32(4 * number + 1, 4 * number + 2), SamplingParams(), task)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_the_vector_is_the_last_token_s_hidden_state(name: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, name.removesuffix("ForCausalLM") + "Config")(**SMALL)
    theirs = getattr(transformers, name)(config).eval().float()
    theirs.save_pretrained(tmp_path)
    ours = engine(tmp_path)
    assert ours.facts.pool_kinds == (PoolKind.LAST,)
    one, other, text = [5, 9, 200, 3, 77, 8, 1, 40, 12], [7], [30, 31, 32]
    new_rows = [row(0, one, LAST), row(1, other, LAST), row(2, text, GENERATE)]
    first = StepPlan(
        1, StepId(1), i32(1, 0, 2), i32(0, 0, 0), i32(1, 5, 3), b"\x00\x00\x01", 9, b"", new_rows
    )  # fmt: skip
    result = ours.step(first, 0).wait()
    assert list(result.pooled) == [0]
    assert len(result.token_ids) == 4
    second = StepPlan(1, StepId(2), i32(2, 0), i32(3, 5), i32(1, 4), b"\x01\x00", 5, removed_rows=i32(1))
    after = ours.step(second, 0).wait()
    assert list(after.pooled) == [1]
    for prompt, vector in ((other, result.pooled[0]), (one, after.pooled[1])):
        with torch.inference_mode():
            wanted = theirs.model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
        found = np.frombuffer(vector, np.float32)
        assert len(vector) == ours.facts.pooled_bytes
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    alone = StepPlan(1, StepId(3), i32(3), i32(0), i32(3), b"", 3, i32(0, 2), [row(3, text, GENERATE)])
    assert ours.step(alone, 0).wait().token_ids == result.token_ids, "the neighbours' vectors change no token"
    assert not ours.rows.pools
