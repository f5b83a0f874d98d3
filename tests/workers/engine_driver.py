"""A CUDA engine with a small model, stepped as a scheduler would, and transformers' own logits for it: for cuda/test_engine.py.

Import it only where there is a CUDA device.
"""

import json
from pathlib import Path

import numpy as np
import tokenizers
import torch

from meshlm.protocol.ids import Row, StepId
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.step_edge import NewRow, StepPlan
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.make import make_engine
from meshlm.workers.output.logits_sampler import LogitsSampler

BLOCK = 16
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4099,
    "hidden_size": 1024,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def engine(folder: Path, news: list[str] | None = None, **settings: object) -> ModelEngine:
    """Of the folder's model, or of MODEL where it has none. news: gets the phases of the start."""
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps(MODEL))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    values: dict[str, object] = {
        "model": str(folder),
        "device": "cuda",
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "kv_cache_memory": 1 << 30,
        **settings,
    }
    phases: list[str] = [] if news is None else news
    return make_engine(resolve.resolve(flags.build(values, None)), lambda phase, *_: phases.append(phase))


class Driver:
    """Rows 0 .. n - 1 with prompts of their own, stepped as a scheduler would."""

    def __init__(self, made: ModelEngine, prompts: list[list[int]], params: SamplingParams) -> None:
        self.engine, self.prompts = made, prompts
        self.strict = False  # no step may wait for the device
        self.computed = [0] * len(prompts)
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.step_id = 0
        blocks = 1024 // BLOCK
        self._new = [
            NewRow(
                Row(row),
                np.array(prompt, np.int32).tobytes(),
                len(prompt),
                np.arange(row * blocks, (row + 1) * blocks, dtype=np.int32).tobytes(),
                params,
            )
            for row, prompt in enumerate(prompts)
        ]

    def step(self, counts: dict[int, int]) -> torch.Tensor:
        """Compute so many tokens of these rows (decodes first); logits of those that sample, float32."""
        order = sorted(counts, key=lambda row: counts[row] != 1)
        known = [len(self.prompts[row]) + len(self.tokens[row]) for row in order]
        samples = [self.computed[row] + counts[row] == length for row, length in zip(order, known, strict=True)]
        self.step_id += 1
        plan = StepPlan(
            1,
            StepId(self.step_id),
            np.array(order, np.int32).tobytes(),
            np.array([self.computed[row] for row in order], np.int32).tobytes(),
            np.array([counts[row] for row in order], np.int32).tobytes(),
            b"" if all(samples) else bytes(samples),
            sum(counts.values()),
            new_rows=[new for new in self._new if new.row in counts],
        )
        self._new = [new for new in self._new if new.row not in counts]
        torch.cuda.set_sync_debug_mode("error" if self.strict else "default")
        try:
            self.result = self.engine.step(plan, 0).wait()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found = np.frombuffer(self.result.token_ids, np.int32).tolist()
        for row in order:
            self.computed[row] += counts[row]
        sampling = [row for row, does in zip(order, samples, strict=True) if does]
        for row, token in zip(sampling, found, strict=True):
            self.tokens[row].append(token)
        by_row = np.argsort(sampling)
        head = self.engine.head
        assert isinstance(head, LogitsSampler)
        if len(sampling) > len(head.logits):
            return torch.empty(0)  # they were made in several chunks
        return head.logits[: len(sampling)].float().clone()[torch.from_numpy(by_row).cuda()]


def prompts_of(lengths: list[int]) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, MODEL["vocab_size"], length).tolist() for length in lengths]  # type: ignore[call-overload]


def reference(made: ModelEngine, tokens: list[int]) -> torch.Tensor:
    """float32 logits after each token, by transformers' own Qwen3 with this engine's weights."""
    import transformers

    config = transformers.Qwen3Config(**{k: v for k, v in MODEL.items() if k not in ("architectures", "torch_dtype")})
    theirs = transformers.Qwen3ForCausalLM(config).cuda().eval()
    weights: dict[str, torch.Tensor] = {name: value.data for name, value in made.model.named_parameters()}
    q, kv = 8 * 128, 2 * 128
    state = {"model.embed_tokens.weight": weights["embed.weight"], "model.norm.weight": weights["norm.weight"]}
    for layer in range(3):
        ours, name = f"layers.{layer}.", f"model.layers.{layer}."
        parts = torch.split(weights[ours + "attention.qkv.weight"], [q, kv, kv])
        for part, what in zip(parts, "qkv", strict=True):
            state[f"{name}self_attn.{what}_proj.weight"] = part
        gate, up = weights[ours + "mlp.gate_up.weight"].chunk(2)
        state |= {
            name + "self_attn.o_proj.weight": weights[ours + "attention.o.weight"],
            name + "self_attn.q_norm.weight": weights[ours + "attention.q_norm.weight"],
            name + "self_attn.k_norm.weight": weights[ours + "attention.k_norm.weight"],
            name + "input_layernorm.weight": weights[ours + "input_norm.weight"],
            name + "post_attention_layernorm.weight": weights[ours + "post_norm.weight"],
            name + "mlp.gate_proj.weight": gate,
            name + "mlp.up_proj.weight": up,
            name + "mlp.down_proj.weight": weights[ours + "mlp.down.weight"],
        }
    theirs.load_state_dict({key: value.float() for key, value in state.items()}, strict=False)
    exact = theirs(torch.tensor([tokens]).cuda()).logits[0]
    rounded = theirs.bfloat16()(torch.tensor([tokens]).cuda()).logits[0]
    return torch.stack((exact, rounded.float()))
