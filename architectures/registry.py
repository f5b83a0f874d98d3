"""Model families by the name of their architecture. A plug-in adds its own with `register`.
A family of our own is imported when a model of it is asked for: a process that serves one model needs one.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from meshlm.architectures.drafters import DRAFTERS, NEXTN, nextn_family
from meshlm.architectures.family import Family, Serves, Weight, stem_of
from meshlm.protocol.model import ModelSpec


class _Module(NamedTuple):
    """The module of this folder with a family, and what must be known to see whether a .gguf file is for it."""

    name: str
    gguf_kind: str = ""


_MODULES = {
    "llama": """
        LlamaForCausalLM=llama HeliumForCausalLM ArceeForCausalLM=arcee CwmForCausalLM
        ApertusForCausalLM=apertus SeedOssForCausalLM=seed_oss SmolLM3ForCausalLM=smollm3
        MistralForCausalLM MixtralForCausalLM=llama MinistralForCausalLM Ministral3ForCausalLM=mistral3
    """,
    "hunyuan": "HunYuanDenseV1ForCausalLM=hunyuan-dense HunYuanMoEV1ForCausalLM=hunyuan-moe",
    "qwen": """
        Qwen2ForCausalLM=qwen2 Qwen3ForCausalLM=qwen3 QWenLMHeadModel=qwen Qwen2MoeForCausalLM=qwen2moe
        Qwen3MoeForCausalLM=qwen3moe
    """,
    "gemma": "GemmaForCausalLM=gemma Gemma2ForCausalLM=gemma2 Gemma3ForCausalLM=gemma3 VaultGemmaForCausalLM",
    "gemma3n": "Gemma3nForCausalLM=gemma3n",
    "gemma4": "Gemma4ForCausalLM=gemma4",
    "phi": "Phi3ForCausalLM=phi3 PhimoeForCausalLM=phimoe PhiMoEForCausalLM PhiForCausalLM=phi2",
    "deepseek": """
        DeepseekV2ForCausalLM=deepseek2 DeepseekV3ForCausalLM DeepseekV32ForCausalLM GlmMoeDsaForCausalLM
        Glm4MoeLiteForCausalLM YoutuForCausalLM
    """,
    "llama4": "Llama4ForCausalLM=llama4",
    "gpt_oss": "GptOssForCausalLM=gpt-oss",
    "granite": """
        GraniteForCausalLM=granite GraniteMoeForCausalLM=granitemoe GraniteMoeSharedForCausalLM
        GraniteMoeHybridForCausalLM=granitehybrid
    """,
    "glm": """
        Glm4MoeForCausalLM=glm4moe Dots1ForCausalLM=dots1 MiniMaxM2ForCausalLM=minimax-m2
        GlmForCausalLM=chatglm Glm4ForCausalLM=glm4
        SolarOpenForCausalLM
    """,
    "ernie4_5": "Ernie4_5ForCausalLM=ernie4_5 Ernie4_5_MoeForCausalLM=ernie4_5-moe",
    "olmo": """
        OlmoeForCausalLM=olmoe Olmo2ForCausalLM=olmo2 Olmo3ForCausalLM Exaone4ForCausalLM=exaone4
        OlmoForCausalLM=olmo
    """,
    "cohere": "CohereForCausalLM=command-r Cohere2ForCausalLM=cohere2",
    "gpt": """
        Starcoder2ForCausalLM=starcoder2 GPT2LMHeadModel=gpt2 GPTBigCodeForCausalLM=starcoder GPTNeoXForCausalLM=gptneox OPTForCausalLM
        StableLmForCausalLM=stablelm GPTJForCausalLM
    """,
    "nemotron": "NemotronForCausalLM=nemotron NemotronHForCausalLM=nemotron_h",
    "alibi": "BloomForCausalLM=bloom MptForCausalLM=mpt MPTForCausalLM FalconForCausalLM=falcon",
    "mamba": "Mamba2ForCausalLM=mamba2 MambaForCausalLM=mamba FalconMambaForCausalLM",
    "hybrid": "BambaForCausalLM FalconH1ForCausalLM=falcon-h1 JambaForCausalLM=jamba",
    "short_states": "Lfm2ForCausalLM=lfm2 Lfm2MoeForCausalLM=lfm2moe RecurrentGemmaForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM=qwen3next Qwen3_5ForCausalLM=qwen35 Qwen3_5MoeForCausalLM=qwen35moe",
    "whisper": "WhisperForConditionalGeneration",
}
"""The decoders of each module of this folder; behind a name the kind (general.architecture) of .gguf files that are for it."""
_OWN = {
    name: _Module(module, kind)
    for module, names in _MODULES.items()
    for name, _, kind in (one.partition("=") for one in names.split())
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
TRANSFORMERS = "TransformersForCausalLM"


def _not_by_name(config: dict[str, Any], architecture: str) -> ModelSpec:
    raise ValueError(
        f"architectures names {architecture}; name the model's own, --model-impl transformers does the rest"
    )


_TRANSFORMERS = Family(
    architecture=TRANSFORMERS,
    model_type="",
    spec=_not_by_name,
    weights=lambda spec: iter(()),
    model="meshlm.workers.models.transformers.model:TransformersModel",
)
"""Any causal decoder of the transformers library (--model-impl transformers), by transformers' own modules with our attention; no
config.json names it. workers/models/transformers/look.py finds what such a model is; transformers reads and checks its weights."""


def register(family: Family) -> None:
    """Let models of this architecture be served. ValueError: there is one of that name."""
    if family.architecture in _FAMILIES:
        raise ValueError(f"architecture {family.architecture} is registered already")
    _FAMILIES[family.architecture] = family


def architectures() -> tuple[str, ...]:
    return tuple(_FAMILIES)


def families() -> dict[str, Family]:
    """All families, by architecture: this imports each."""
    return {name: _family(name) for name in list(_FAMILIES)}


def family_of(architecture: str) -> Family | None:
    """The family with this name in config.json's `architectures`."""
    if architecture.endswith(NEXTN):
        target = family_of(architecture.removesuffix(NEXTN))
        return nextn_family(target) if target is not None and target.nextn is not None else None
    known = architecture in _FAMILIES or architecture in DRAFTERS or architecture == TRANSFORMERS
    return _family(architecture) if known else None


def serves(spec: ModelSpec) -> Serves:
    """The tasks that this model does for clients: those of its family, or, of a plug-in's that names none, those its spec allows."""
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
    if architecture == TRANSFORMERS:
        return _TRANSFORMERS
    if architecture in DRAFTERS:
        return DRAFTERS[architecture]
    if architecture.endswith(NEXTN):
        return nextn_family(_family(architecture.removesuffix(NEXTN)))
    found = _FAMILIES[architecture]
    if isinstance(found, _Module):
        module = import_module(f"meshlm.architectures.{found.name}")
        several: tuple[Family, ...] = getattr(module, "FAMILIES", ()) or (module.FAMILY,)
        if architecture in _VECTORS and architecture not in [family.architecture for family in several]:
            vectors = import_module("meshlm.architectures.sequence").vector_families
            several = tuple(made for family in several for made in vectors(family))
        found = next(family for family in several if family.architecture == architecture)
        if found.model != Family._field_defaults["model"]:  # workers/models/compiled.py knows decoder.py's layers
            found = found._replace(compiles=False)
        _FAMILIES[architecture] = found
    return found


def _gguf_kind(found: Family | _Module) -> str:
    if isinstance(found, _Module):
        return found.gguf_kind
    return found.gguf.kind if found.gguf else ""
