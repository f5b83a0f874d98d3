"""The settings of structured outputs: `--structured-outputs-config`, as JSON."""

from typing import Literal

from msgspec import Struct


class StructuredOutputsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names and defaults are vLLM's. The library is llguidance, which vLLM calls guidance."""

    backend: Literal["auto", "guidance"] = "auto"
    disable_any_whitespace: bool = False  # JSON is compact
    disable_additional_properties: bool = False  # objects have no properties that their schema does not name
    enable_in_reasoning: bool = False  # reasoning keeps to the grammar too
