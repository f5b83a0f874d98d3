"""What cannot be split is refused by the flag's name, with what would do."""

import msgspec
import pytest
from tiny_models import spec_of

from meshlm.architectures.layers import with_attention, with_shared_caches
from meshlm.protocol.config import ParallelConfig
from meshlm.protocol.layers import MLASpec, MoESpec
from meshlm.protocol.model import AltUpSpec, PerLayerInputSpec
from meshlm.runtime import platforms
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import parallel

SMOLLM2 = spec_of(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
)


def config(tp: int = 1, pp: int = 1, dp: int = 1) -> ParallelConfig:
    return ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp, data_parallel_size=dp)


@pytest.mark.parametrize(
    ("given", "device", "text"),
    [
        (config(tp=2), "cpu", "--tensor-parallel-size 2: does not divide the model's 9 attention heads; .* over 1, 3$"),
        (config(tp=9), "cpu", "--tensor-parallel-size 9: does not divide the model's intermediate size 1536"),
        (config(pp=4), "cpu", "--pipeline-parallel-size 4: does not divide the model's 30 layers; 1, 2, 3, 5, 6, 10"),
        (
            config(tp=3, dp=2),
            "cuda",
            "--tensor-parallel-size 3 x --data-parallel-size 2 needs 6 GPUs.*this host shows 4",
        ),
        (config(pp=5), "cuda", "--pipeline-parallel-size 5 needs 5 GPUs"),
    ],
)
def test_refused(given: ParallelConfig, device: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(UsageError, match=text):
        parallel.check(given, SMOLLM2, device, given.data_parallel_size * given.workers_per_rank)


def test_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7,8,9")
    parallel.check(config(tp=3, pp=2), SMOLLM2, "cuda", 6)
    parallel.check(config(tp=3, pp=30, dp=7), SMOLLM2, "cpu", 630)
    parallel.check(config(tp=2, pp=7), SMOLLM2, "fake", 14)


def test_what_ranks_split_of_experts() -> None:
    """An MLP's width counts where a layer has one, that of experts where ranks have a part of each, that of shared ones always."""
    moe = MoESpec(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=10, shared_intermediate_size=12)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 60, "num_key_value_heads": 60, "intermediate_size": 7}
    everywhere = spec_of(moe=moe, **sizes)
    parallel.check(config(tp=2), everywhere, "cpu", 2)
    with pytest.raises(UsageError, match=r"-size 3: does not divide the model's intermediate size 10; .* over 1, 2$"):
        parallel.check(config(tp=3), everywhere, "cpu", 3)
    parallel.check(config(tp=3), everywhere, "cpu", 3, whole_experts=True)
    with pytest.raises(UsageError, match=r"-size 5: does not divide the model's intermediate size 12"):
        parallel.check(config(tp=5), everywhere, "cpu", 5, whole_experts=True)
    some = spec_of(moe=moe, moe_layers=(True, False), **sizes)
    with pytest.raises(UsageError, match=r"-size 2: does not divide the model's intermediate size 7; .* over 1$"):
        parallel.check(config(tp=2), some, "cpu", 2)


def test_a_node_needs_gpus_for_its_own_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    parallel.check(config(tp=3, dp=4), SMOLLM2, "cuda", 3)
    with pytest.raises(UsageError, match="needs 12 GPUs, one per worker, 6 of them on this node; this host shows 3"):
        parallel.check(config(tp=3, dp=4), SMOLLM2, "cuda", 6)


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("2", 1), ("GPU-8f2e,MIG-1", 2)])
def test_visible_gpus(visible: str, count: int) -> None:
    assert platforms.named("cuda").num_devices({"CUDA_VISIBLE_DEVICES": visible}) == count


def test_a_model_that_has_no_stages() -> None:
    altup = AltUpSpec(
        altup_num_inputs=4,
        altup_active_idx=0,
        altup_correct_scale=True,
        laurel_rank=4,
        hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=100,
    )
    latent = MLASpec(kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, index_shared=True)
    inputs = PerLayerInputSpec(hidden_size_per_layer_input=4, vocab_size_per_layer_input=100)
    shared = [False, *[True] * 29]
    changed = (
        (msgspec.structs.replace(SMOLLM2, altup=altup), "vectors that the first stage alone could make"),
        (msgspec.structs.replace(SMOLLM2, per_layer_input=inputs), "vectors that the first stage alone could make"),
        (with_shared_caches(SMOLLM2, 2, ""), "keys and values of earlier ones, which another stage would have"),
        (
            with_attention(SMOLLM2, shared, mla=latent),
            "what an earlier one's index has chosen, which another stage may have",
        ),
    )
    for spec, said in changed:
        with pytest.raises(UsageError, match=f"{said}; use --tensor-parallel-size"):
            parallel.check(config(pp=2), spec, "cpu", 2)
        parallel.check(config(tp=3, dp=2), spec, "cpu", 6)


def test_layers_with_heads_of_their_own_are_split_too() -> None:
    spec = with_attention(msgspec.structs.replace(SMOLLM2, num_attention_heads=18), num_key_value_heads=6)
    spec = with_attention(spec, [False, *[True] * 29], num_key_value_heads=9)
    parallel.check(config(tp=3), spec, "cpu", 3)
    with pytest.raises(
        UsageError, match=r"neither divides the model's 9 key-value heads nor is a multiple; .* over 1, 3$"
    ):
        parallel.check(config(tp=6), spec, "cpu", 6)
