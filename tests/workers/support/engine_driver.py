"""An engine with a small model, stepped as a scheduler would, on any device; and transformers' own logits for it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch

from meshlm.protocol.adapters import Adapter
from meshlm.protocol.audio import Audio
from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.media import Media
from meshlm.protocol.pool import Pool
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row, StepId
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.make import make_engine
from meshlm.workers.output.logits_sampler import LogitsSampler
from meshlm.workers.output.sampler import TorchHead

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


class Seen(NamedTuple):
    """Logits of one row [vocab], float32, after so many of its tokens."""

    row: int
    length: int
    logits: torch.Tensor


class Driver:
    """Rows 0 .. n - 1 with prompts of their own, stepped as a scheduler would."""

    def __init__(
        self,
        made: ModelEngine,
        prompts: list[list[int]],
        params: SamplingParams,
        tasks: dict[int, Pool] | None = None,
        audio: Sequence[Audio | Media] | None = None,
        adapters: dict[int, Adapter] | None = None,
        most: int = 1024,
    ) -> None:
        """tasks: of the rows that want a vector instead of tokens. audio: of all rows. adapters: of the
        rows that have one. most: tokens for which a row has blocks; the model's context, where that is shorter."""
        self._most = most
        self._sounds, self._adapters = audio, adapters or {}
        self.engine, self.prompts, self.params, self.tasks = made, prompts, params, tasks or {}
        self.strict = False  # no step may wait for the device
        self.spoils = False  # what no row sees any more is NaN before each step, as if others had it
        self.computed = [0] * len(prompts)
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.seen: list[Seen] = []
        self.pooled: dict[int, bytes] = {}  # by row
        self.step_id = 0
        self._removed: list[int] = []
        self._new = [self._row(row, prompt) for row, prompt in enumerate(prompts)]
        self._torch_logits = torch.empty(0)
        if isinstance(made.head, TorchHead):
            self._listen(made.head)

    def _row(self, row: int, tokens: list[int]) -> NewRow:
        blocks = -(-self._most // self.engine.rows.block_size) * self.engine.rows.num_groups
        own = np.arange(row * blocks, (row + 1) * blocks, dtype=np.int32)
        told = np.array(tokens, np.int32).tobytes()
        extras = ((self.tasks[row],) if row in self.tasks else (), () if self._sounds is None else (self._sounds[row],))
        adapter = (self._adapters[row],) if row in self._adapters else ()
        extras_of_row = (*extras[0], *extras[1], *adapter)
        return NewRow(Row(row), told, len(self.prompts[row]), own.tobytes(), self.params, extras_of_row)

    def _listen(self, head: TorchHead) -> None:
        """This head keeps no logits: note them as it makes them."""
        sample = head.sample

        def noted(hidden: torch.Tensor, batch: Any, step: Any) -> None:
            self._torch_logits = self.engine.model.logits(hidden).float().clone()
            sample(hidden, batch, step)

        setattr(head, "sample", noted)  # noqa: B010 - mypy lets nobody assign a method

    def again(self, row: int, cached: int) -> None:
        """The row begins anew with all tokens that it has by now: preempted, or behind a cached prefix of so many tokens."""
        self._removed.append(row)
        self._new.append(self._row(row, self.prompts[row] + self.tokens[row]))
        self.computed[row] = cached

    def _spoil(self) -> None:
        size, groups = self.engine.rows.block_size, self.engine.rows.num_groups
        blocks = -(-self._most // size)
        for row, computed in enumerate(self.computed):
            for group, spec in enumerate(self.engine.layout.specs):
                unseen = range(spec.first_needed(size, computed))
                pages = torch.tensor([(row * blocks + nth) * groups + group for nth in unseen], dtype=torch.long)
                for cache in self.engine.compute.caches:
                    cache.keys[pages] = cache.values[pages] = torch.nan

    def length(self, row: int) -> int:
        """Tokens that are known."""
        return len(self.prompts[row]) + len(self.tokens[row])

    def step(self, counts: dict[int, int]) -> torch.Tensor:
        """Compute so many tokens of these rows (decodes first); logits of those that sample, float32."""
        if self.spoils:
            self._spoil()
        order = sorted(counts, key=lambda row: counts[row] != 1)
        known = [self.length(row) for row in order]
        samples = [
            self.computed[row] + counts[row] == length and row not in self.tasks
            for row, length in zip(order, known, strict=True)
        ]
        self.step_id += 1
        plan = StepPlan(
            1,
            StepId(self.step_id),
            np.array(order, np.int32).tobytes(),
            np.array([self.computed[row] for row in order], np.int32).tobytes(),
            np.array([counts[row] for row in order], np.int32).tobytes(),
            b"" if all(samples) else bytes(samples),
            sum(counts.values()),
            np.array(self._removed, np.int32).tobytes(),
            [new for new in self._new if new.row in counts],
        )
        self._removed, self._new = [], [new for new in self._new if new.row not in counts]
        cuda = self.engine.device.type == "cuda"
        if cuda:
            torch.cuda.set_sync_debug_mode("error" if self.strict else "default")
        try:
            self.result = self.engine.step(plan, 0).wait()
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode("default")
        found = np.frombuffer(self.result.token_ids, np.int32).tolist()
        for row in order:
            self.computed[row] += counts[row]
        for place, vector in self.result.pooled.items():
            assert order[place] not in self.pooled, "a second vector"
            self.pooled[order[place]] = vector
        sampling = [row for row, does in zip(order, samples, strict=True) if does]
        for row, token in zip(sampling, found, strict=True):
            self.tokens[row].append(token)
        logits = self._logits(len(sampling))
        lengths = [length for length, does in zip(known, samples, strict=True) if does]
        self.seen += [Seen(*each) for each in zip(sampling, lengths, logits, strict=False)]
        return logits[torch.from_numpy(np.argsort(sampling)).to(logits.device)] if len(logits) else logits

    def _logits(self, count: int) -> torch.Tensor:
        """Of the last step's rows, in the order in which they stood; none where they were made in several chunks."""
        head = self.engine.head
        if isinstance(head, TorchHead):
            return self._torch_logits[:count]
        assert isinstance(head, LogitsSampler)
        return head.logits[:count].float().clone() if count <= len(head.logits) else torch.empty(0)


def prompts_of(lengths: list[int]) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, MODEL["vocab_size"], length).tolist() for length in lengths]  # type: ignore[call-overload]


def in_bfloat16(theirs: Any) -> Any:
    """A transformers model in bfloat16 as one that is loaded so: the frequencies of its rotation stay what they are.

    `Module.bfloat16` alone would round them as well, and positions some hundred tokens away would be turned by other angles.
    """
    kept = {name: buffer.clone() for name, buffer in theirs.named_buffers() if name.endswith("inv_freq")}
    theirs.bfloat16()
    for name, buffer in kept.items():
        owner, _, last = name.rpartition(".")
        setattr(theirs.get_submodule(owner), last, buffer)
    return theirs


def weights_of_reference(made: ModelEngine) -> dict[str, torch.Tensor]:
    """This engine's weights by transformers' names for them, in float32."""
    weights: dict[str, torch.Tensor] = {name: value.data for name, value in made.model.named_parameters()}
    spec = made.resolved.spec
    q, kv = (count * spec.head_dim for count in (spec.num_attention_heads, spec.num_key_value_heads))
    state = {"model.embed_tokens.weight": weights["embed.weight"], "model.norm.weight": weights["norm.weight"]}
    for layer in range(spec.num_hidden_layers):
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
    return {key: value.float() for key, value in state.items()}


def reference(made: ModelEngine, tokens: list[int]) -> torch.Tensor:
    """float32 logits after each token, by transformers' own Qwen3 with this engine's weights."""
    import transformers

    config = transformers.Qwen3Config(**{k: v for k, v in MODEL.items() if k not in ("architectures", "torch_dtype")})
    theirs = transformers.Qwen3ForCausalLM(config).cuda().eval()
    theirs.load_state_dict(weights_of_reference(made), strict=False)
    exact = theirs(torch.tensor([tokens]).cuda()).logits[0]
    rounded = in_bfloat16(theirs)(torch.tensor([tokens]).cuda()).logits[0]
    return torch.stack((exact, rounded.float()))
