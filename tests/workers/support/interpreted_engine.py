"""An engine with a GPU's kernels, inputs and head, on the CPU: the interpreter runs the kernels. No graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from at_once import AtOnce

from meshlm.protocol.config import MeshConfig
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.attention.triton_backend import TritonBackend
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.kit import TorchKit
from meshlm.workers.engine.triton_inputs import TritonInputs
from meshlm.workers.graphs.replays import Replays
from meshlm.workers.layers.ops import TorchOps
from meshlm.workers.layers.triton_ops import TritonOps
from meshlm.workers.models import decoder
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.output.logits_sampler import LogitsSampler
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.speculative.device_drafters import device_drafter_of
from meshlm.workers.speculative.device_verification import DeviceVerification, device_lines


class RotatedByKernels(TorchOps):
    """Plain torch, but for what attention's kernels read."""

    rope_cache = TritonOps.rope_cache


class Copied:
    """A model whose logits are copied: a CPU's weights are packed."""

    def __init__(self, model: Decoder) -> None:
        self.spec, self._model = model.spec, model

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = self._model.logits(hidden)
        return found if out is None else out.copy_(found)


class InterpretedKit(TorchKit):
    def draft_lines(self, config: MeshConfig) -> int:
        return device_lines(config.require_resolved().max_num_seqs, config.speculative.num_speculative_tokens)

    def inputs(self, rows: DeviceRows, *, samples: bool) -> TritonInputs:
        self._inputs = TritonInputs(rows, AtOnce(), rows.state.device, samples=samples)
        return self._inputs

    def head(self, model: Decoder, rows: DeviceRows, dtype: torch.dtype, *, samples: bool) -> LogitsSampler:
        self._head = LogitsSampler(cast("Decoder", Copied(model)), rows, dtype, rows.state.device)
        return self._head

    def verification(self, engine: ModelEngine) -> DeviceVerification | None:
        if not engine.config.speculative.method:
            return None
        drafter = device_drafter_of(engine, self._inputs, self._head, Replays(None))
        if (model := engine.draft_model) is not None:
            own = cast("Decoder", SimpleNamespace(spec=model.spec, logits=model.logits))
            model.logits = Copied(own).logits  # type: ignore[method-assign]
        return DeviceVerification(engine.config.speculative, drafter, engine.rows, self._inputs)


def made_alone(config: MeshConfig) -> ModelEngine:
    """Within `interpreter`."""
    return ModelEngine(config, torch.device("cpu"), TritonBackend(), InterpretedKit(), lambda *_: None)


@contextmanager
def interpreted(values: dict[str, object]) -> Iterator[ModelEngine]:
    """Of these settings."""
    with interpreter():
        yield made_alone(resolve.resolve(flags.build(values, None)))


@contextmanager
def interpreter() -> Iterator[None]:
    """Engines that are made here compute by it."""
    grad = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "make_ops", lambda *_: RotatedByKernels())
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=4))
        yield
    torch.set_grad_enabled(grad)
