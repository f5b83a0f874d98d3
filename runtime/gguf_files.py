"""What a .gguf file says of its model: shape and tokenizer, as Hugging Face's names. Reads no tensor data.

The reader maps the file; it is dropped before returning. Source of the keys: the GGUF specification (ggml/docs/gguf.md).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshlm.protocol.model import ModelSpec, RopeSpec

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class GGUFError(ValueError):
    """The file is no usable GGUF file; the text says why."""


def open_reader(path: Path) -> Any:
    """A gguf.GGUFReader. GGUFError when the file is not one or is cut short."""
    from gguf import GGUFReader  # heavy, and not needed by models in other formats

    try:
        return GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise GGUFError(f"{path}: not a readable GGUF file ({error})") from None


def read_fields(path: Path, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """The metadata whose keys are wanted."""
    reader = open_reader(path)
    return {name: field.contents() for name, field in reader.fields.items() if wanted(name)}


def read_spec(path: Path) -> tuple[ModelSpec, dict[str, Any]]:
    """The model's shape, and the metadata outside the vocabulary (bos and eos ids, chat template, name)."""
    big = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")
    reader = open_reader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if name not in big}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    kind = fields.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise GGUFError(f"{path}: architecture {kind!r} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}")

    def get(key: str, default: Any = None) -> Any:
        value = fields.get(f"{kind}.{key}", default)
        if value is None:
            raise GGUFError(f"{path}: metadata {kind}.{key} is missing")
        return value

    heads = int(get("attention.head_count"))
    hidden = int(get("embedding_length"))
    context = int(get("context_length"))
    spec = ModelSpec(
        architecture=ARCHITECTURES[kind],
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=hidden,
        intermediate_size=int(get("feed_forward_length")),
        num_hidden_layers=int(get("block_count")),
        num_attention_heads=heads,
        num_key_value_heads=int(get("attention.head_count_kv", heads)),
        head_dim=int(get("attention.key_length", hidden // heads)),
        max_position_embeddings=context,
        rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope=_rope(get, context),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        qk_norm=kind == "qwen3",
        dtype="float32",
    )
    return spec, fields


def _rope(get: Callable[..., Any], context: int) -> RopeSpec:
    kind = str(get("rope.scaling.type", "none"))
    theta = float(get("rope.freq_base", 10000.0))
    if kind in ("none", ""):
        return RopeSpec(rope_theta=theta)
    return RopeSpec(
        rope_type=kind,
        rope_theta=theta,
        factor=float(get("rope.scaling.factor", 1.0)),
        original_max_position_embeddings=int(get("rope.scaling.original_context_length", context)),
    )
