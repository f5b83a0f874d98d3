"""The settings of mixtures of experts over several ranks."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

NO_STEP = 32768
"""Tokens that are more than steps have: over NVLink halves mostly take longer than whole steps (docs/moe.md)."""
HALVED_RANKS, HALVED_TOKENS = 4, 2048
"""From so many ranks and tokens of prompts a rank on they take less time, where tokens are written into other GPUs' memory."""


class EPLBConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The balancing of experts over ranks, so that each has about as many tokens. Names and defaults are vLLM's, but for use_async."""

    window_size: Annotated[int, Meta(ge=1)] = 1000  # steps whose tokens count
    step_interval: Annotated[int, Meta(ge=1)] = 3000  # steps between two rearrangements
    num_redundant_experts: Annotated[int, Meta(ge=0)] = 0  # of all ranks together
    log_balancedness: bool = False
    log_balancedness_interval: Annotated[int, Meta(ge=1)] = 1  # steps
    use_async: bool = False
    policy: Literal["default"] = "default"
    communicator: Literal["torch_gloo", "torch_nccl"] | None = None


class ExpertConfig(Struct, frozen=True, kw_only=True):
    """Mixtures of experts over several ranks."""

    enable_expert_parallel: Annotated[
        bool,
        Meta(
            description="each rank has some of the experts whole, instead of a part of each (-tp) or all of them (-dp)",
            extra={"short": "-ep"},
        ),
    ] = False
    all2all_backend: Annotated[
        Literal["allgather_reducescatter", "all_to_all", "peer_memory"],
        Meta(
            description="how tokens come to the experts of other data-parallel ranks, and results back; peer_memory: written "
            "into the memory of other GPUs"
        ),
    ] = "allgather_reducescatter"
    enable_eplb: Annotated[
        bool, Meta(description="experts move between ranks while they serve, so that ranks have as many tokens each")
    ] = False
    eplb_config: Annotated[
        str,
        Meta(
            description="of --enable-eplb, as JSON: window_size, step_interval, num_redundant_experts, log_balancedness, "
            "log_balancedness_interval"
        ),
    ] = "{}"
    enable_dbo: Annotated[
        bool,
        Meta(description="a step is computed as two halves: one's tokens travel to experts while the other computes"),
    ] = False
    dbo_decode_token_threshold: Annotated[
        int, Meta(ge=0, description="tokens of each rank from which on a step of decodes is halved")
    ] = NO_STEP
    dbo_prefill_token_threshold: (
        Annotated[
            int,
            Meta(
                ge=0,
                description="tokens of each rank from which on a step with prompts is halved; where none is given: "
                f"{HALVED_TOKENS} with peer_memory and {HALVED_RANKS} ranks or more, else no step",
            ),
        ]
        | None
    ) = None

    def prefill_threshold(self, num_ranks: int) -> int:
        """--dbo-prefill-token-threshold, or what was measured for so many ranks."""
        if self.dbo_prefill_token_threshold is not None:
            return self.dbo_prefill_token_threshold
        return HALVED_TOKENS if self.all2all_backend == "peer_memory" and num_ranks >= HALVED_RANKS else NO_STEP

    @property
    def eplb(self) -> EPLBConfig:
        """The fields of --eplb-config. msgspec.DecodeError names a field that cannot be so."""
        return msgspec.json.decode(self.eplb_config, type=EPLBConfig)

    @property
    def num_redundant_experts(self) -> int:
        """Slots for experts that all ranks together have beyond one for each."""
        return self.eplb.num_redundant_experts if self.enable_eplb else 0
