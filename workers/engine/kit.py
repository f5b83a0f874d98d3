"""What the kernels of a device bring to the engine: the only thing in which a CPU, an old GPU and a GPU with Triton differ in a step.

`TorchKit` is plain torch, and the compiled C kernels of the CPU, on any device; it has no CUDA graphs. `TritonKit` is in
triton_kit.py, since Triton may not even be installed beside a CPU build of torch.
"""

from typing import TYPE_CHECKING

import torch

from meshlm.workers.engine.inputs import TorchInputs
from meshlm.workers.graphs.dispatcher import Captures, Dispatcher
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.output.head import TorchHead
from meshlm.workers.rows.device_rows import DeviceRows

if TYPE_CHECKING:
    from meshlm.workers.engine import ProgressReport
    from meshlm.workers.engine.engine import ModelEngine
    from meshlm.workers.engine.triton_inputs import TritonInputs
    from meshlm.workers.output.logits_sampler import LogitsSampler


class TorchKit:
    """The engine calls these while it is made, in this order."""

    def inputs(self, rows: DeviceRows, *, samples: bool) -> "TorchInputs | TritonInputs":
        """samples: whether tokens are sampled by this worker (not on a stage of a pipeline before the last)."""
        return TorchInputs(rows)

    def head(
        self, model: Decoder, rows: DeviceRows, dtype: torch.dtype, *, samples: bool
    ) -> "TorchHead | LogitsSampler":
        """The head's way to choose tokens."""
        return TorchHead(model, rows, dtype)

    def graphs(self, engine: "ModelEngine") -> tuple[Dispatcher, Captures]:
        """The CUDA graphs of this device, and when they are captured."""
        graphs = Dispatcher([], lambda key: None)
        return graphs, Captures(graphs, lambda: None)

    def attention_wave(self, engine: "ModelEngine") -> int:
        """Tokens of a prompt's chunk whose attention fills the device once; 0 where that is not known, or makes no difference."""
        return 0

    def compile_ahead(self, engine: "ModelEngine", report: "ProgressReport") -> None:
        """Have the kernels compiled, before there is a KV cache: here nothing is compiled."""

    def warm_up(self, engine: "ModelEngine") -> None:
        """Run what no first request should pay for. The KV cache is there, and holds nothing yet."""
        engine.dummy_step([1])
