"""What a stage of a pipeline tells the backends of attention about its pages."""

import pytest
from tiny_models import resolved_of, spec_of

from meshlm.protocol.config import MeshConfig, ParallelConfig
from meshlm.protocol.layers import Attention, Layers, LayerSpec, StateSpec
from meshlm.workers.distributed.placement import WorkerPlacement
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.engine import make

STATE = StateSpec(kind="mamba2", num_heads=4, head_dim=8, state_size=8)
LAYERS = Layers.from_records(
    [LayerSpec(attention=Attention(num_key_value_heads=1, head_dim=8)), LayerSpec(state=STATE)]
)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_without_states_has_the_pages_of_the_others(stage: int) -> None:
    """Its kernels of attention must be right with blocks that are made for states."""
    spec = spec_of(layers=LAYERS)
    config = MeshConfig(parallel=ParallelConfig(pipeline_parallel_size=2), resolved=resolved_of(spec))
    told, size = make._with_pages(config, spec, WorkerPlacement(Shard(pp_rank=stage, pp_size=2)))
    assert told.state is not None
    assert (told.state.num_heads, told.state.dtype) == (4, "float32")
    assert size == 32, "64 bytes of keys and values a token, 4 heads of 64 numbers and their convolution"
