"""`lora_request` of LLM and AsyncLLM: prompts that adapters answer. ValueError says what is wrong with one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.extras import Extras
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files import adapter_files
from meshlm.supervisor.errors import raised_as


@dataclass(frozen=True)
class LoRARequest:
    """An adapter, by vLLM's names. Its folder is read at each call, so that it may have changed between two; `lora_int_id`,
    `base_model_name` and `load_inplace` say nothing more."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One for all prompts, or one for each."""


def extras_of(given: LoRARequests, count: int, config: MeshConfig) -> list[Extras]:
    """What each of so many prompts carries."""
    if not given:
        return [()] * count
    if not config.adapters.enable_lora:
        raise ValueError("lora_request: make the LLM with enable_lora=True")
    each = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * count
    if len(each) != count:
        raise ValueError(f"{count} prompts and {len(each)} of lora_request")
    read: dict[LoRARequest, Extras] = {}
    for one in each:
        if one is not None and not isinstance(one, LoRARequest):
            raise ValueError(f"lora_request: a LoRARequest is expected, no {type(one).__name__}")
        if one is not None and one not in read:
            read[one] = _read(one, config)
    return [() if one is None else read[one] for one in each]


def _read(given: LoRARequest, config: MeshConfig) -> Extras:
    resolved = config.require_resolved()
    limits = adapter_files.Limits.of(config, resolved.device)
    with raised_as(ValueError, ModelFilesError, of="lora_request"):
        return (adapter_files.adapter_of(given.lora_name, Path(given.lora_path), resolved.spec, limits),)
