"""Model families by the name of their architecture. A plug-in adds its own with `register`.

A family of our own is imported when a model of it is asked for: a process that serves one model needs one.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from meshlm.architectures.family import Family, Serves, Weight, stem_of
from meshlm.protocol.model import ModelSpec


class _Module(NamedTuple):
    """The module of this folder with a family, and what must be known to see whether a .gguf file is for it."""

    name: str
    gguf_kind: str = ""


_OWN = {
    "LlamaForCausalLM": _Module("llama", "llama"),
    "MistralForCausalLM": _Module("mistral"),
    "Qwen2ForCausalLM": _Module("qwen", "qwen2"),
    "Qwen3ForCausalLM": _Module("qwen", "qwen3"),
    "GemmaForCausalLM": _Module("gemma", "gemma"),
    "Gemma2ForCausalLM": _Module("gemma", "gemma2"),
    "Gemma3ForCausalLM": _Module("gemma", "gemma3"),
    "Gemma3nForCausalLM": _Module("gemma3n", "gemma3n"),
    "Gemma4ForCausalLM": _Module("gemma4", "gemma4"),
    "Phi3ForCausalLM": _Module("phi", "phi3"),
    "PhimoeForCausalLM": _Module("phi", "phimoe"),
    "PhiMoEForCausalLM": _Module("phi"),
    "HeliumForCausalLM": _Module("llama"),
    "HunYuanDenseV1ForCausalLM": _Module("llama", "hunyuan-dense"),
    "ApertusForCausalLM": _Module("llama", "apertus"),
    "QWenLMHeadModel": _Module("qwen", "qwen"),
    "MixtralForCausalLM": _Module("mistral", "llama"),
    "Qwen2MoeForCausalLM": _Module("qwen", "qwen2moe"),
    "Qwen3MoeForCausalLM": _Module("qwen", "qwen3moe"),
    "DeepseekV2ForCausalLM": _Module("deepseek", "deepseek2"),
    "DeepseekV3ForCausalLM": _Module("deepseek"),
    "Llama4ForCausalLM": _Module("llama4", "llama4"),
    "GptOssForCausalLM": _Module("gpt_oss", "gpt-oss"),
    "DeepseekV32ForCausalLM": _Module("deepseek"),
    "GlmMoeDsaForCausalLM": _Module("deepseek"),
    "GraniteForCausalLM": _Module("granite", "granite"),
    "GraniteMoeForCausalLM": _Module("granite", "granitemoe"),
    "Glm4MoeForCausalLM": _Module("glm", "glm4moe"),
    "Dots1ForCausalLM": _Module("glm", "dots1"),
    "SeedOssForCausalLM": _Module("llama", "seed_oss"),
    "MinistralForCausalLM": _Module("mistral"),
    "Ministral3ForCausalLM": _Module("mistral", "mistral3"),
    "Ernie4_5ForCausalLM": _Module("ernie4_5", "ernie4_5"),
    "Ernie4_5_MoeForCausalLM": _Module("ernie4_5", "ernie4_5-moe"),
    "MiniMaxM2ForCausalLM": _Module("glm", "minimax-m2"),
    "OlmoeForCausalLM": _Module("olmo", "olmoe"),
    "Olmo2ForCausalLM": _Module("olmo", "olmo2"),
    "Olmo3ForCausalLM": _Module("olmo"),
    "SmolLM3ForCausalLM": _Module("llama", "smollm3"),
    "Exaone4ForCausalLM": _Module("olmo", "exaone4"),
    "CohereForCausalLM": _Module("cohere", "command-r"),
    "Cohere2ForCausalLM": _Module("cohere", "cohere2"),
    "GlmForCausalLM": _Module("glm", "chatglm"),
    "Glm4ForCausalLM": _Module("glm", "glm4"),
    "Starcoder2ForCausalLM": _Module("gpt", "starcoder2"),
    "GPT2LMHeadModel": _Module("gpt", "gpt2"),
    "GPTNeoXForCausalLM": _Module("gpt", "gptneox"),
    "PhiForCausalLM": _Module("phi", "phi2"),
    "OPTForCausalLM": _Module("gpt"),
    "StableLmForCausalLM": _Module("gpt", "stablelm"),
    "GPTJForCausalLM": _Module("gpt"),
    "NemotronForCausalLM": _Module("nemotron", "nemotron"),
    "OlmoForCausalLM": _Module("olmo", "olmo"),
    "BloomForCausalLM": _Module("alibi", "bloom"),
    "MptForCausalLM": _Module("alibi", "mpt"),
    "MPTForCausalLM": _Module("alibi"),
    "FalconForCausalLM": _Module("alibi", "falcon"),
    "Mamba2ForCausalLM": _Module("mamba", "mamba2"),
    "BambaForCausalLM": _Module("hybrid"),
    "GraniteMoeHybridForCausalLM": _Module("granite", "granitehybrid"),
    "NemotronHForCausalLM": _Module("nemotron", "nemotron_h"),
    "FalconH1ForCausalLM": _Module("hybrid", "falcon-h1"),
    "MambaForCausalLM": _Module("mamba", "mamba"),
    "FalconMambaForCausalLM": _Module("mamba"),
    "Lfm2ForCausalLM": _Module("lfm2", "lfm2"),
    "JambaForCausalLM": _Module("hybrid", "jamba"),
    "RecurrentGemmaForCausalLM": _Module("recurrent_gemma"),
    "Qwen3NextForCausalLM": _Module("qwen3_next", "qwen3next"),
    "Qwen3_5ForCausalLM": _Module("qwen3_next", "qwen35"),
    "Qwen3_5MoeForCausalLM": _Module("qwen3_next", "qwen35moe"),
    "WhisperForConditionalGeneration": _Module("whisper"),
}
_SAME_KINDS = {"nemotron_h_moe": "nemotron_h"}
"""Kinds of .gguf files that llama.cpp keeps apart, and one family reads."""
_SEQUENCE, _TOKENS = "ForSequenceClassification", "ForTokenClassification"
_OF_ENCODERS = ("Model", "ForMaskedLM", _SEQUENCE, _TOKENS)
_VECTORS = {
    **{
        f"{stem}{suffix}": _Module(found.name)
        for stem, found in ((stem_of(name), found) for name, found in _OWN.items())
        if stem
        for suffix in ("Model", _SEQUENCE, _TOKENS)
    },
    **dict.fromkeys(("Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"), _Module("qwen")),
    **{name: _Module("bert") for name in ("HF_ColBERT", *(f"Bert{suffix}" for suffix in _OF_ENCODERS))},
    "BertModel": _Module("bert", "bert"),
    "BertSpladeSparseEmbeddingModel": _Module("bert"),
    "BgeM3EmbeddingModel": _Module("bert"),
    **{f"{stem}{suffix}": _Module("bert") for stem in ("Roberta", "XLMRoberta") for suffix in _OF_ENCODERS},
    **{f"ModernBert{suffix}": _Module("bert") for suffix in _OF_ENCODERS},
}
"""Models that give vectors of texts: decoders without their output projection (sequence.py), and encoders."""
_FAMILIES: dict[str, Family | _Module] = {**_OWN, **_VECTORS}
_UNLISTED = {"TransformersForCausalLM": _Module("transformers_backend")}
"""What no config.json names: how models are served whose architecture is not here."""


def register(family: Family) -> None:
    """Let models of this architecture be served. ValueError: there is one of that name."""
    if family.architecture in _FAMILIES:
        raise ValueError(f"architecture {family.architecture} is registered already")
    _FAMILIES[family.architecture] = family


def architectures() -> tuple[str, ...]:
    """The names of all families."""
    return tuple(_FAMILIES)


def families() -> dict[str, Family]:
    """All families, by architecture: this imports each."""
    return {name: _family(name) for name in list(_FAMILIES)}


def family_of(architecture: str) -> Family | None:
    """The family with this name in config.json's `architectures`."""
    return _family(architecture) if architecture in _FAMILIES or architecture in _UNLISTED else None


def serves(spec: ModelSpec) -> Serves:
    """What this model does for clients: what its family says, and of a plug-in's that says nothing what its spec leaves it."""
    family = family_of(spec.architecture)
    found = Serves.TEXT if family is None else family.serves
    if found is not Serves.TEXT:
        return found
    return Serves.CLASSES if spec.head is not None else Serves.VECTORS if spec.encoder_only else Serves.TEXT


def gguf_kinds() -> tuple[str, ...]:
    """The values of general.architecture of .gguf files that some family reads."""
    return (*dict.fromkeys(filter(None, map(_gguf_kind, _FAMILIES.values()))), *_SAME_KINDS)


def gguf_family(fields: Mapping[str, Any]) -> Family | None:
    """The family of a file with this metadata: its kind may be that of dense models and of mixtures of experts."""
    kind = fields.get("general.architecture")
    family_kind = _SAME_KINDS.get(str(kind), kind)
    of_kind = [name for name, found in _FAMILIES.items() if kind and _gguf_kind(found) == family_kind]
    experts = bool(fields.get(f"{kind}.expert_count"))
    alike = (family for family in map(_family, of_kind) if family.gguf and family.gguf.experts == experts)
    return next(alike, _family(of_kind[0]) if of_kind else None)


@cache
def weights_of(spec: ModelSpec) -> dict[str, Weight]:
    """All tensors of a model, by Hugging Face's names."""
    return {weight.name: weight for weight in _family(spec.architecture).weights(spec)}


def _family(architecture: str) -> Family:
    if architecture in _UNLISTED:
        unlisted: Family = import_module(f"meshlm.architectures.{_UNLISTED[architecture].name}").FAMILY
        return unlisted
    found = _FAMILIES[architecture]
    if isinstance(found, _Module):
        module = import_module(f"meshlm.architectures.{found.name}")
        several: tuple[Family, ...] = getattr(module, "FAMILIES", ()) or (module.FAMILY,)
        if architecture in _VECTORS and architecture not in [family.architecture for family in several]:
            vectors = import_module("meshlm.architectures.sequence").vector_families
            several = tuple(made for family in several for made in vectors(family))
        found = next(family for family in several if family.architecture == architecture)
        _FAMILIES[architecture] = found
    return found


def _gguf_kind(found: Family | _Module) -> str:
    if isinstance(found, _Module):
        return found.gguf_kind
    return found.gguf.kind if found.gguf else ""
