"""Experts that cannot be spread as the flags say are refused by the flag's name, with what would do."""

import msgspec
import pytest
from tiny_models import spec_of

from meshlm.protocol.config import ExpertConfig, MeshConfig, ParallelConfig
from meshlm.protocol.layers import MoESpec
from meshlm.protocol.model import ModelSpec
from meshlm.runtime import platforms
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flag_rules, notes, rules

DENSE = spec_of()
MIXED = spec_of(moe=MoESpec(num_experts=12, num_experts_per_tok=2, moe_intermediate_size=8))
EP = ExpertConfig(enable_expert_parallel=True)


def check(config: MeshConfig, spec: ModelSpec, device: str) -> None:
    rules.check(flag_rules.experts(config, flag_rules.Facts(spec, platforms.named(device))))


def config(expert_settings: ExpertConfig = EP, **parallel: object) -> MeshConfig:
    return MeshConfig(experts=expert_settings, parallel=msgspec.convert(parallel, ParallelConfig))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            config(data_parallel_size=5),
            r"5 ranks \(--data-parallel-size 5 x --tensor-parallel-size 1\) do not divide .* 12 e",
        ),
        (config(data_parallel_size=2, tensor_parallel_size=4), "8 ranks .* 12 experts; 1, 2, 3, 4, 6, 12 do$"),
        (config(data_parallel_size=2, pipeline_parallel_size=2), "leave out -pp"),
        (config(data_parallel_size=2, data_parallel_hybrid_lb=True), "outer balancer"),
        (config(data_parallel_size=2, data_parallel_external_lb=True, data_parallel_rank=1), "outer balancer"),
    ],
)
def test_refused(given: MeshConfig, text: str) -> None:
    with pytest.raises(UsageError, match=f"^--enable-expert-parallel: .*{text}"):
        check(given, MIXED, "cuda")


def test_a_model_without_experts() -> None:
    with pytest.raises(UsageError, match=r"^--enable-expert-parallel: LlamaForCausalLM has no experts; leave it out$"):
        check(config(), DENSE, "cuda")
    check(config(ExpertConfig()), DENSE, "cuda")


@pytest.mark.parametrize(
    ("given", "together"),
    [
        (config(data_parallel_size=4), True),
        (config(data_parallel_size=2, tensor_parallel_size=2), True),
        (config(tensor_parallel_size=4, pipeline_parallel_size=2), False),
        (config(tensor_parallel_size=4, nnodes=2), False),
        (config(data_parallel_size=2, nnodes=2), True),
        (config(data_parallel_size=2, data_parallel_size_local=1), True),
        (config(data_parallel_size=2, data_parallel_start_rank=1), True),
        (config(ExpertConfig(), data_parallel_size=5), False),
    ],
)
def test_what_can_be(given: MeshConfig, together: bool) -> None:
    """Data-parallel ranks that share experts step together; tensor-parallel ones do so anyway."""
    check(given, MIXED, "cuda")
    assert given.lockstep is together


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (config(ExpertConfig(enable_dbo=True), data_parallel_size=2), "it needs --enable-expert-parallel$"),
        (
            config(ExpertConfig(enable_dbo=True, enable_expert_parallel=True), tensor_parallel_size=2),
            "it needs --data-parallel-size 2 or more; without, no tokens travel$",
        ),
    ],
)
def test_dual_batch_overlap_needs_tokens_that_travel(given: MeshConfig, text: str) -> None:
    with pytest.raises(UsageError, match=f"^--enable-dbo: {text}"):
        check(given, MIXED, "cuda")


def balanced(eplb: str = "{}", dp: int = 2, tp: int = 1, **parallel: object) -> MeshConfig:
    settings = ExpertConfig(enable_expert_parallel=True, enable_eplb=True, eplb_config=eplb)
    return config(settings, data_parallel_size=dp, tensor_parallel_size=tp, **parallel)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            config(ExpertConfig(enable_eplb=True), data_parallel_size=2),
            "--enable-eplb: it needs --enable-expert-parallel$",
        ),
        (balanced(dp=1), "--enable-eplb: it needs --data-parallel-size or --tensor-parallel-size 2"),
        (balanced(dp=1, tp=2, pipeline_parallel_size=2), "--enable-eplb: .* are one stage, on one node$"),
        (balanced(dp=1, tp=2, nnodes=2), "--enable-eplb: .* are one stage, on one node$"),
        (
            balanced('{"num_redundant_experts": 14}', dp=1, tp=2),
            "num_redundant_experts 14: with 12 every rank has all .* at most that",
        ),
        (config(ExpertConfig(eplb_config='{"window_size": 5}')), "--eplb-config: it goes with --enable-eplb$"),
        (balanced("{"), "--eplb-config {: "),
        (balanced('{"window": 5}'), "--eplb-config .* unknown field `window`"),
        (balanced('{"step_interval": 0}'), r"--eplb-config .*>= 1 - at `\$.step_interval`"),
        (balanced('{"policy": "best"}'), r"--eplb-config .*'best' - at `\$.policy`"),
        (balanced('{"use_async": true}'), "--eplb-config use_async: .* leave it out$"),
        (
            balanced('{"communicator": "torch_nccl"}'),
            "--eplb-config communicator torch_nccl: with --device cpu it is torch_gloo",
        ),
        (balanced('{"communicator": "nixl"}'), "--eplb-config .*'nixl'"),
        (
            balanced('{"num_redundant_experts": 3}'),
            "--eplb-config num_redundant_experts 3: 2 ranks .* do not divide it",
        ),
        (
            balanced('{"num_redundant_experts": 6}', tp=2),
            "--eplb-config num_redundant_experts 6: 4 ranks .* do not divide it",
        ),
        (
            balanced('{"num_redundant_experts": 14}'),
            "num_redundant_experts 14: with 12 every rank has all .* at most that",
        ),
    ],
)
def test_experts_that_cannot_be_balanced(given: MeshConfig, text: str) -> None:
    with pytest.raises(UsageError, match=f"^{text}" if text.startswith("-") else text):
        check(given, MIXED, "cpu")


def test_experts_that_are_balanced() -> None:
    given = balanced('{"num_redundant_experts": 12, "use_async": false, "communicator": "torch_gloo"}')
    check(given, MIXED, "cpu")
    assert given.experts.num_redundant_experts == 12
    check(balanced('{"num_redundant_experts": 12}', dp=1, tp=2), MIXED, "cpu")
    assert (given.experts.eplb.window_size, given.experts.eplb.step_interval) == (1000, 3000)


def test_a_backend_that_the_device_cannot_run() -> None:
    settings = ExpertConfig(enable_expert_parallel=True, all2all_backend="peer_memory")
    check(config(settings, data_parallel_size=2), MIXED, "cuda")
    with pytest.raises(
        UsageError, match=r"^--all2all-backend peer_memory: it needs GPUs; use allgather_reducescatter or"
    ):
        check(config(settings, data_parallel_size=2), MIXED, "cpu")


@pytest.mark.parametrize(
    ("settings", "dp", "told"),
    [
        ({}, 2, False),
        ({"enable_dbo": True}, 2, True),
        ({"enable_dbo": True, "dbo_prefill_token_threshold": 8192}, 2, False),
        ({"enable_dbo": True, "dbo_prefill_token_threshold": 8193}, 2, True),
        ({"enable_dbo": True, "dbo_decode_token_threshold": 64}, 2, False),
        ({"enable_dbo": True, "dbo_decode_token_threshold": 65}, 2, True),
        ({"enable_dbo": True, "all2all_backend": "peer_memory"}, 2, True),
        ({"enable_dbo": True, "all2all_backend": "peer_memory"}, 4, False),
    ],
)
def test_halves_that_no_step_will_have_are_said_before_the_start(
    settings: dict[str, object], dp: int, told: bool
) -> None:
    """A step of decodes has a token for each request at most. Its own worker's log had said it, minutes later and of prompts alone."""
    given = config(msgspec.convert({"enable_expert_parallel": True, **settings}, ExpertConfig), data_parallel_size=dp)
    found = notes.of_halves(given, max_num_seqs=64, max_num_batched_tokens=8192)
    assert [note.startswith("--enable-dbo: no step is halved: ") for note in found] == [True] * told
