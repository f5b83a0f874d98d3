"""A small model for an engine on the CPU, and steps of it as a scheduler would ask for them."""

import numpy as np

from meshlm.protocol.edges.step import NewRow, StepPlan, StepResult
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row, StepId
from meshlm.workers.engine.engine import ModelEngine

VOCAB, BLOCK, LENGTH, OUTPUT = 211, 16, 128, 6
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
PROMPTS = [[3 + (31 * n + 7 * i) % 200 for i in range(5 + 20 * n)] for n in range(3)]


def new(row: int, prompt: list[int], params: SamplingParams) -> NewRow:
    blocks = np.arange(row * LENGTH // BLOCK, (row + 1) * LENGTH // BLOCK, dtype=np.int32)
    return NewRow(Row(row), np.array(prompt, np.int32).tobytes(), len(prompt), blocks.tobytes(), params)


def step(made: ModelEngine, parts: list[tuple[int, int, int, bool]], news: list[NewRow]) -> StepResult:
    """parts: (row, start, count, samples), decodes first."""
    rows, starts, counts = (np.array([part[at] for part in parts], np.int32).tobytes() for at in range(3))
    samples = bytes(part[3] for part in parts)
    plan = StepPlan(1, StepId(1), rows, starts, counts, samples, sum(part[2] for part in parts), new_rows=news)
    return made.step(plan, 7).wait()


def tokens_of(result: StepResult) -> list[int]:
    found: list[int] = np.frombuffer(result.token_ids, np.int32).tolist()
    return found


def alone(made: ModelEngine, prompt: list[int], params: SamplingParams) -> list[int]:
    """Each token from a prompt that is computed anew as a whole: no step reads what an earlier one wrote."""
    tokens = list(prompt)
    for _ in range(OUTPUT):
        row = NewRow(Row(3), np.array(tokens, np.int32).tobytes(), len(prompt), new(3, [], params).block_ids, params)
        tokens += tokens_of(step(made, [(3, 0, len(tokens), True)], [row]))
    return tokens[len(prompt) :]
