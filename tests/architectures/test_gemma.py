"""Gemma's files: configurations as they are published, what is refused, and what a .gguf file leaves unsaid."""

from pathlib import Path
from typing import Any

import pytest
from model_folders import CONFIG, folder_with
from tiny_models import sliding

from meshlm.architectures.family import GGUFMetadata
from meshlm.architectures.registry import gguf_family
from meshlm.protocol.model import ModelSpec, RopeSpec
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.model_config import parse_config
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, resolve

SIZES = {**CONFIG, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "num_key_value_heads": 1}
GEMMA2: dict[str, Any] = SIZES | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "cache_implementation": "hybrid",
    "query_pre_attn_scalar": 224,
    "sliding_window": 4096,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
}
GEMMA3: dict[str, Any] = SIZES | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "num_hidden_layers": 8,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 32768,
}


def spec_of_config(config: dict[str, Any]) -> ModelSpec:
    spec, notes = parse_config(config, Path("m"))
    assert notes == ()
    return spec


def test_gemma_2() -> None:
    spec = spec_of_config(GEMMA2)
    assert (spec.sliding_window, sliding(spec)) == (4096, (True, False))
    assert (spec.attn_logit_softcapping, spec.final_logit_softcapping, spec.query_pre_attn_scalar) == (50, 30, 224)
    assert spec.tie_word_embeddings
    assert (spec.sliding_rope, spec.qk_norm, spec.hidden_act) == (None, False, "gelu_pytorch_tanh")
    assert spec_of_config(GEMMA2 | {"attn_logit_softcapping": None}).attn_logit_softcapping == 0
    full = spec_of_config(GEMMA2 | {"layer_types": ["full_attention"] * 2})
    assert (full.sliding_window, sliding(full)) == (0, (False, False))


def test_gemma_3() -> None:
    """The context is the file's, which counts the scaled rotation already."""
    spec = spec_of_config(GEMMA3)
    assert sliding(spec) == (True,) * 5 + (False,) + (True,) * 2
    assert spec.rope == RopeSpec(rope_type="linear", rope_theta=1e6, factor=8.0)
    assert spec.sliding_rope == RopeSpec(rope_theta=1e4)
    assert (spec.max_position_embeddings, spec.qk_norm, spec.attn_logit_softcapping) == (32768, True, 0)
    newer = {key: value for key, value in GEMMA3.items() if not key.startswith(("rope_", "sliding_window_p"))}
    by_kind = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4},
    }
    assert spec_of_config({**newer, "rope_parameters": by_kind}) == spec
    assert spec_of_config(newer).rope == RopeSpec(rope_theta=1e6)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GEMMA2 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be positive"),
        (GEMMA2 | {"final_logit_softcapping": -1.0}, "final_logit_softcapping must be a number that is not negative"),
        (GEMMA2 | {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention True changes"),
        (GEMMA2 | {"rope_local_base_freq": 1e4}, "rope_local_base_freq 10000.0 changes"),
        (GEMMA2 | {"sliding_window": None}, "sliding_window must be positive where layers slide"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 changes"),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 1.0}}, "rope_parameters holds rope_theta"),
        (GEMMA3 | {"rope_parameters": {"full_attention": 3}}, "rope_parameters must be an object"),
    ],
)
def test_what_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFilesError, match=said):
        parse_config(config, Path("m"))


def test_numbers_outgrow_float16(tmp_path: Path) -> None:
    """auto takes bfloat16 on a GPU in its place."""

    def dtype(**settings: object) -> str:
        folder = folder_with(tmp_path, **{"config.json": GEMMA2 | {"torch_dtype": "float16"}})
        values = {"model": folder, "load_format": "dummy", "device": "cuda", **settings}
        found = resolve.resolve(flags.build(values, None)).resolved
        assert found is not None
        return found.dtype

    assert dtype() == "bfloat16"
    with pytest.raises(UsageError, match="--dtype float16: the residual of Gemma2ForCausalLM outgrows it"):
        dtype(dtype="float16")
    with pytest.raises(UsageError, match="--compile inductor: it is not there for Gemma2ForCausalLM"):
        dtype(compile="inductor")


def gguf_spec(kind: str, **fields: Any) -> ModelSpec:
    least = {
        "block_count": 2,
        "attention.head_count": 4,
        "embedding_length": 64,
        "context_length": 128,
        "feed_forward_length": 64,
        "attention.key_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-6,
        **fields,
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (100, 64)} | {f"blk.{n}": (1,) for n in range(99)}
    family = gguf_family({"general.architecture": kind})
    assert family is not None
    assert family.gguf is not None
    named = {f"{kind}.{key}": value for key, value in least.items()}
    return family.gguf.spec(GGUFMetadata(kind, named, shapes, ()), family.architecture)


def test_what_a_gguf_file_of_gemma_2_leaves_unsaid() -> None:
    spec = gguf_spec("gemma2")
    assert (spec.sliding_window, sliding(spec)) == (4096, (True, False))
    assert (spec.attn_logit_softcapping, spec.final_logit_softcapping, spec.query_pre_attn_scalar) == (50, 30, 32)
    assert gguf_spec("gemma2", block_count=46).query_pre_attn_scalar == 16, "the 27B model's is the size over its heads"


def test_what_a_gguf_file_of_gemma_3_leaves_unsaid() -> None:
    window = {"attention.sliding_window": 512, "block_count": 7}
    spec = gguf_spec("gemma3", **window)
    assert (spec.sliding_window, sliding(spec)) == (512, (True,) * 5 + (False, True))
    assert (spec.sliding_rope, spec.qk_norm) == (RopeSpec(rope_theta=1e4), True)
    assert sliding(gguf_spec("gemma3", **window, **{"attention.sliding_window_pattern": 3}))[2] is False
    assert gguf_spec("gemma3", **(window | {"block_count": 62})).query_pre_attn_scalar == 16
    with pytest.raises(ValueError, match=r"attention\.sliding_window is missing"):
        gguf_spec("gemma3")
    with pytest.raises(ValueError, match="names 1 layers of 7"):
        gguf_spec("gemma3", **window, **{"attention.sliding_window_pattern": [True]})


def test_gemma_1_means_the_tanh_form_by_gelu() -> None:
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    config = {key: GEMMA2[key] for key in (*sizes, "head_dim", "max_position_embeddings") if key in GEMMA2}
    config |= {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu"}
    assert spec_of_config(config).hidden_act == "gelu_pytorch_tanh"
    assert spec_of_config(config | {"hidden_activation": "gelu"}).hidden_act == "gelu_pytorch_tanh"
    found = gguf_spec("gemma")
    assert (found.architecture, found.hidden_act, found.sliding_window) == ("GemmaForCausalLM", "gelu_pytorch_tanh", 0)
