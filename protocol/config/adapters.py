"""The settings of adapters (LoRA): which there are, and how many of them are computed with at once."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class AdapterConfig(Struct, frozen=True, kw_only=True):
    """Flags by vLLM's names. Adapters are read by the supervisor and by frontends, and computed with by workers."""

    enable_lora: Annotated[bool, Meta(description="serve adapters (LoRA) of the model, which requests name")] = False
    lora_modules: Annotated[
        tuple[str, ...],
        Meta(
            description='adapters that are there from the start: name=folder, or JSON {"name": ..., "path": ...}',
            extra={"repeat": True},
        ),
    ] = ()
    max_loras: Annotated[
        int, Meta(ge=1, le=1024, description="adapters that the rows of one step may have; others wait")
    ] = 1
    max_lora_rank: Annotated[
        Literal[1, 8, 16, 32, 64, 128, 256, 320, 512], Meta(description="of an adapter, at most")
    ] = 16
    max_cpu_loras: (
        Annotated[
            int, Meta(ge=1, description="adapters that a worker keeps in the host's memory; default: --max-loras")
        ]
        | None
    ) = None
    lora_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"], Meta(description="of adapters in memory; auto: the model's")
    ] = "auto"
    lora_target_modules: Annotated[
        tuple[str, ...],
        Meta(
            description="modules that adapters may change, as q_proj; an adapter with others is refused; default: all"
        ),
    ] = ()
    fully_sharded_loras: Annotated[
        bool, Meta(description="taken for vLLM's sake: both products of an adapter are split as far as its layer is")
    ] = False

    allow_runtime_lora_updating: Annotated[
        bool, Meta(description="with --enable-lora: POST /v1/load_lora_adapter and /v1/unload_lora_adapter")
    ] = False

    lora_resolver_dir: Annotated[
        str,
        Meta(
            description="with --allow-runtime-lora-updating: a folder of adapters; a request for a name that nobody has gets the one "
            "that is called so"
        ),
    ] = ""

    @property
    def num_kept(self) -> int:
        """Adapters that a worker keeps in the host's memory."""
        return max(self.max_cpu_loras or 0, self.max_loras)
