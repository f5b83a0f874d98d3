"""The settings of mixtures of experts over several ranks."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


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
        Literal["allgather_reducescatter", "all_to_all"],
        Meta(description="how tokens come to the experts of other data-parallel ranks, and results back"),
    ] = "allgather_reducescatter"
    enable_dbo: Annotated[
        bool,
        Meta(description="a step is computed as two halves: one's tokens travel to experts while the other computes"),
    ] = False
    dbo_decode_token_threshold: Annotated[
        int, Meta(ge=0, description="tokens of each rank from which on a step of decodes is halved")
    ] = 32
    dbo_prefill_token_threshold: Annotated[
        int, Meta(ge=0, description="tokens of each rank from which on a step with prompts is halved")
    ] = 512
