"""Makes the engine of `--device tiny`; imported by workers alone.

A platform for another device of torch gives `torch_engine` that device, and a kit with the device's own kernels and marks.
"""

import torch

from meshlm.protocol.config import MeshConfig
from meshlm.workers.distributed.membership import Membership
from meshlm.workers.distributed.placement import WorkerPlacement
from meshlm.workers.engine import Engine, ProgressReport
from meshlm.workers.engine.kit import TorchKit
from meshlm.workers.engine.make import load_plug_ins, torch_engine


def engine(config: MeshConfig, worker: int, membership: Membership, report: ProgressReport) -> Engine:
    load_plug_ins()
    placement = WorkerPlacement.of(config, worker, membership)
    return torch_engine(config, torch.device("cpu"), TorchKit(), report, placement)
