"""The drafter that --speculative-config names."""

from typing import TYPE_CHECKING

from meshlm.workers.engine.kit import TorchInputs
from meshlm.workers.models.drafters import StateDrafter
from meshlm.workers.speculative.draft_passes import DraftPasses
from meshlm.workers.speculative.drafter import Drafter
from meshlm.workers.speculative.model_drafter import ModelDrafter
from meshlm.workers.speculative.ngram import NgramDrafter
from meshlm.workers.speculative.states_drafter import StatesDrafter
from meshlm.workers.speculative.suffix import SuffixDrafter

if TYPE_CHECKING:
    from meshlm.workers.engine.engine import ModelEngine


def drafter_of(engine: "ModelEngine") -> Drafter:
    """Of an engine whose tokens are on the host. It has no caches yet."""
    config, rows = engine.config.speculative, engine.rows
    if config.method == "suffix":
        return SuffixDrafter(rows.tokens.numpy(), config)
    if config.method == "ngram":
        return NgramDrafter(rows.tokens.numpy(), config.prompt_lookup_min, config.prompt_lookup_max)
    assert engine.draft_model is not None and isinstance(engine.inputs, TorchInputs)  # noqa: PT018
    model = engine.draft_model
    passes = DraftPasses(model, engine.spec.vocab_size, rows, engine.inputs, engine.compute)
    if not isinstance(model, StateDrafter):
        return ModelDrafter(passes)
    model.share(engine.model)
    if model.taps:
        engine.model.tap(model.taps, engine.resolved.max_num_batched_tokens)
    return StatesDrafter(passes, engine.model, model.taps)
