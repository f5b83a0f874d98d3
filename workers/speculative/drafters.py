"""The drafter that --speculative-config names."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshlm.protocol.config.speculative import METHODS, SpeculativeConfig
from meshlm.runtime import plugins
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.engine.kit import TorchInputs
from meshlm.workers.models.drafters import StateDrafter
from meshlm.workers.rows.changes import I32
from meshlm.workers.speculative.draft_passes import DraftPasses
from meshlm.workers.speculative.drafter import Drafter
from meshlm.workers.speculative.model_drafter import ModelDrafter
from meshlm.workers.speculative.ngram import NgramDrafter
from meshlm.workers.speculative.states_drafter import StatesDrafter
from meshlm.workers.speculative.suffix import SuffixDrafter
from meshlm.workers.speculative.verification import Verification

if TYPE_CHECKING:
    from meshlm.workers.engine.engine import ModelEngine


FLAG = "--speculative-config"
MakeDrafter = Callable[[I32, SpeculativeConfig], Drafter]
"""What an entry point of `meshlm.drafters` names: called once with the tokens of all rows, int32 [rows, width], and the settings."""
_makers: dict[str, MakeDrafter] = {}  # of plug-ins, by name, in this process


def _of_plugin(name: str) -> MakeDrafter:
    """ProcessFatal."""
    try:
        plugins.load(plugins.DRAFTERS, os.environ, _makers.__setitem__, only=name)
    except plugins.PluginError as error:
        raise ProcessFatal(str(error)) from None
    return _makers[name]


def verification_of(engine: "ModelEngine") -> Verification | None:
    """What drafts and verifies by plain torch; None without --speculative-config. ProcessFatal."""
    config, rows, inputs = engine.config.speculative, engine.rows, engine.inputs
    if not config.method:
        return None
    assert isinstance(inputs, TorchInputs)
    if engine.device.type != "cpu":
        raise ProcessFatal(f"{FLAG}: plain torch computes on this GPU, and drafts nothing there; leave it out")
    return Verification(config, drafter_of(engine), rows, inputs, staged=engine.shard.pp_size > 1)


def drafter_of(engine: "ModelEngine") -> Drafter:
    """The drafter of an engine whose tokens are on the host. It has no caches yet."""
    config, rows = engine.config.speculative, engine.rows
    if config.method == "suffix":
        return SuffixDrafter(rows.tokens.numpy(), config)
    if config.method == "ngram":
        return NgramDrafter(rows.tokens.numpy(), config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method not in METHODS:
        return _of_plugin(config.method)(rows.tokens.numpy(), config)
    assert engine.draft_model is not None and isinstance(engine.inputs, TorchInputs)  # noqa: PT018
    model = engine.draft_model
    passes = DraftPasses(model, engine.spec.vocab_size, rows, engine.inputs, engine.compute)
    if not isinstance(model, StateDrafter):
        return ModelDrafter(passes)
    model.share(engine.model)
    if model.taps:
        engine.model.tap(model.taps, engine.resolved.max_num_batched_tokens)
    return StatesDrafter(passes, engine.model, model.taps)
