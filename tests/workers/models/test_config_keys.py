"""Every key of a family's config.json with another value: transformers' logits, or a refusal that names the key.

Logits, not tokens: what multiplies or caps all of them leaves the likeliest one where it is.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import encoder_models
import pytest
import torch
from config_changes import NOT_CHANGED, Change, changes
from engine_driver import Driver, engine
from family_models import CASES, STATES
from small_models import SMALL

from meshlm.architectures.config_keys import is_needless
from meshlm.architectures.registry import family_of
from meshlm.protocol.pool import Pool, PoolKind
from meshlm.protocol.sampling import SamplingParams
from meshlm.supervisor.errors import UsageError

PROMPTS = [[5, 9, 200, 3, 77], [3 + 31 * n % 200 for n in range(23)], [7 + (29 * n + n * n) % 200 for n in range(37)]]
TOLERANCE = 3e-5  # of the largest logit
SEEN = 1e-3  # by so much of the largest logit they differ where one of these is another
ALWAYS_SEEN = ("multiplier", "scaling", "softcapping", "eps", "epsilon", "logit_scale", "attn_scale")
KINDS = ("Model", "ForSequenceClassification", "ForTokenClassification")
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: case for name, case in CASES.items() if not name.startswith(("PhiMoE", "MPT"))},
    "FalconH1ForCausalLM normed": STATES["falcon-h1-normed"],
    "GraniteMoeHybridForCausalLM dense": STATES["granite-dense"],
    **{f"{stem}{kind}": (f"{stem}{kind}", {}) for stem in encoder_models.CASES for kind in KINDS},
}
ASIDE = {
    ("NemotronHForCausalLM", "attention_bias"): "transformers makes no biases there",
    ("NemotronHForCausalLM", "time_step_limit"): "transformers limits time steps in its CUDA kernels alone",
    (
        "NemotronHForCausalLM",
        "tie_word_embeddings",
    ): "transformers saves two tables, and ours is refused when it is loaded",
    ("FalconForCausalLM", "alibi"): "transformers rounds to bfloat16; test_models.py has it",
}


class Model(NamedTuple):
    """transformers' model with random weights."""

    config: Any
    model: Any

    def logits(self) -> torch.Tensor:
        """Behind each prompt; of an encoder the states of all tokens, of a classifier its logits."""
        with torch.no_grad():
            found = [self.model(torch.tensor([prompt])) for prompt in PROMPTS]
        if type(self.model).__name__.endswith("ForCausalLM") or type(self.model).__name__.endswith("LMHeadModel"):
            return torch.stack([one.logits[0, -1] for one in found])
        return torch.cat([(one.logits if "logits" in one else one.last_hidden_state).flatten() for one in found])


def made(case: tuple[str, dict[str, Any]], **changed: Any) -> Model:
    import transformers

    torch.manual_seed(0)
    name, own = case
    stem = name.partition("For")[0].removesuffix("Model")
    if stem in encoder_models.CASES:
        values = encoder_models.SIZES | encoder_models.CASES[stem] | own
        config = getattr(transformers, f"{stem}Config")(**{**values, **changed, "attn_implementation": "eager"})
        model = getattr(transformers, name)(config).eval().float()
    else:
        config = getattr(transformers, name)(**{**SMALL, "initializer_range": 0.2, **own, **changed})
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() == 1 or parameter_name.endswith("bias"):
            parameter.data += torch.randn_like(parameter) * 0.3
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
            buffer += torch.randn_like(buffer) * 0.3
    return Model(config, model)


def served(theirs: Model, folder: Path) -> torch.Tensor:
    """The logits of the engine that loads what transformers saves. UsageError: it refuses the files."""
    theirs.model.save_pretrained(folder)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "load_format": "auto", "cpu_threads": 1}
    made = engine(folder, max_model_len=128, max_num_seqs=64, kv_cache_memory=256 << 20, **settings)
    pooling, whole = made.resolved.pooling, {row: len(prompt) for row, prompt in enumerate(PROMPTS)}
    if pooling is None:
        return Driver(made, PROMPTS, SamplingParams(temperature=0.0)).step(whole)
    task = pooling.pool(pooling.tasks[0], activation=False) if made.model.spec.head else Pool(PoolKind.ALL)
    driver = Driver(made, PROMPTS, SamplingParams(temperature=0.0), dict.fromkeys(whole, task))
    driver.step(whole)
    return torch.cat([torch.frombuffer(bytearray(driver.pooled[row]), dtype=torch.float32) for row in whole])


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def effect(theirs: Model, base: Model, base_logits: torch.Tensor) -> float | None:
    """How much another value moves transformers' logits with the same weights; None where the weights are others."""
    if {name: one.shape for name, one in theirs.model.state_dict().items()} != {
        name: one.shape for name, one in base.model.state_dict().items()
    }:
        return None
    theirs.model.load_state_dict(base.model.state_dict())
    return distance(theirs.logits(), base_logits)


def fault(
    change: Change, folder: Path, theirs: Model, expected: torch.Tensor, moved: Callable[[], float | None]
) -> str:
    """What is wrong with our answer to the change; empty: nothing. moved: how much it moves transformers' logits."""
    try:
        off = distance(served(theirs, folder), expected)
    except UsageError as error:
        return "" if any(name in str(error) for name in change.names()) else f"refused, and not by name: {error}"
    if not off < TOLERANCE:
        return f"logits are {off:.1e} away"
    found = moved() if change.key.endswith(ALWAYS_SEEN) else None
    return f"the test does not see it ({found:.1e})" if found is not None and found < SEEN else ""


@pytest.mark.parametrize("base", BASES)
def test_every_key_is_honoured_or_refused_by_name(base: str, tmp_path: Path) -> None:
    architecture, case = base.partition(" ")[0], BASES[base]
    family = family_of(architecture)
    assert family is not None
    plain = made(case)
    plain_logits = plain.logits()
    assert distance(served(plain, tmp_path / "plain"), plain_logits) < TOLERANCE
    faults, changed = [], set()
    for nth, change in enumerate(changes(json.loads(plain.config.to_json_string(use_diff=False)))):
        if is_needless(change.key) or (architecture, change.key) in ASIDE:
            continue
        try:
            theirs = made(case, **{change.key: change.value})
            expected = theirs.logits()
        except Exception:
            continue
        changed.add(change.key)
        if found := fault(change, tmp_path / str(nth), theirs, expected, partial(effect, theirs, plain, plain_logits)):
            faults.append(f"{change.key} {change.value!r}: {found}")
    assert not faults, "\n".join(faults)
    aside = {key for name, key in ASIDE if name == architecture}
    left = {key for key in family.keys - changed - aside - NOT_CHANGED if not is_needless(key)}
    assert not left, f"no other value is tried of {', '.join(sorted(left))}"
