"""Flags of recurrent states: what cannot be honoured is refused by name."""

import msgspec
import pytest
from tiny_models import spec_of

from meshlm.protocol.config import CacheConfig, MeshConfig, ParallelConfig
from meshlm.protocol.kv import RecurrentState
from meshlm.protocol.layers import Layers, LayerSpec, StateSpec
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flag_rules, parallel, rules
from meshlm.workers.kv_capacity import state_spec

HYBRID = spec_of(
    num_attention_heads=4,
    layers=Layers.alike(
        LayerSpec(state=StateSpec(kind="mamba2", num_heads=4, head_dim=2, state_size=2, n_groups=2)), 1
    ),
)


def check_states(cache: CacheConfig, spec: ModelSpec) -> None:
    rules.check(flag_rules.states(MeshConfig(cache=cache), spec))


@pytest.mark.parametrize(
    ("cache", "text"),
    [
        (CacheConfig(mamba_cache_mode="all"), "--mamba-cache-mode all: LlamaForCausalLM has no state-space layers"),
        (CacheConfig(mamba_block_size=64), "--mamba-block-size 64: LlamaForCausalLM has no state-space layers"),
        (CacheConfig(mamba_ssm_cache_dtype="float32"), "--mamba-ssm-cache-dtype float32: LlamaForCausalLM has no"),
    ],
)
def test_models_without_states_refuse_them(cache: CacheConfig, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        check_states(cache, spec_of())


@pytest.mark.parametrize(
    ("cache", "text"),
    [
        (CacheConfig(mamba_cache_mode="align", enable_prefix_caching=False), "align: it needs --enable-prefix-caching"),
        (CacheConfig(mamba_block_size=64, enable_prefix_caching=False), "64: it needs --enable-prefix-caching"),
        (CacheConfig(mamba_block_size=64, mamba_cache_mode="none"), "there are no checkpoints"),
    ],
)
def test_flags_that_contradict_one_another(cache: CacheConfig, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        check_states(cache, HYBRID)


def test_what_fits_is_taken() -> None:
    check_states(CacheConfig(), spec_of())
    check_states(CacheConfig(mamba_cache_mode="none"), spec_of())
    check_states(CacheConfig(mamba_cache_mode="all", mamba_block_size=1056, mamba_cache_dtype="float32"), HYBRID)


def test_the_policy_of_states() -> None:
    assert state_spec(CacheConfig(), 528) == RecurrentState("align", 1)
    assert state_spec(CacheConfig(), 144) == RecurrentState("align", 4), "a checkpoint after 512 tokens or more"
    assert state_spec(CacheConfig(enable_prefix_caching=False), 528) == RecurrentState("none")
    assert state_spec(CacheConfig(mamba_cache_mode="all", mamba_block_size=1056), 528) == RecurrentState("all", 2)
    with pytest.raises(ProcessFatal, match=r"--mamba-block-size 600: no multiple of .* 528 tokens; 1056 would do"):
        state_spec(CacheConfig(mamba_block_size=600), 528)


def test_ranks_split_heads_and_groups() -> None:
    parallel.check(ParallelConfig(tensor_parallel_size=2), HYBRID, "cpu", 2)
    with pytest.raises(UsageError, match=r"--tensor-parallel-size 4: does not divide the 4 heads and 2 groups"):
        parallel.check(ParallelConfig(tensor_parallel_size=4), HYBRID, "cpu", 4)


def test_processes_read_what_the_supervisor_writes() -> None:
    """A configuration travels as JSON, which has no infinity: no process of a hybrid's mesh could read one."""
    assert msgspec.json.decode(msgspec.json.encode(HYBRID), type=ModelSpec) == HYBRID
