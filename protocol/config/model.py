"""The settings of the model: which one is served, and how its files are read."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from meshlm.protocol.config.per_node import PER_NODE

AUTO_LEN = -1  # of max_model_len: the model's, or what the KV cache has room for


class ModelConfig(Struct, frozen=True, kw_only=True):
    """The model to serve, and how to read its files."""

    model: Annotated[
        str,
        Meta(
            description="folder, .gguf file or hub name (owner/name:Q4_K_M for a .gguf file); empty: SmolLM2-135M-Instruct",
            extra=PER_NODE,
        ),
    ] = ""
    served_model_name: Annotated[
        tuple[str, ...], Meta(description="names that clients use; the first is shown", extra=PER_NODE)
    ] = ()
    tokenizer: Annotated[
        str,
        Meta(description="folder, file or hub name of the tokenizer, where it is not the model's own", extra=PER_NODE),
    ] = ""
    chat_template: Annotated[
        str,
        Meta(
            description="name of one of the model's templates, a file with one, or the template itself", extra=PER_NODE
        ),
    ] = ""
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(
            description="what templates get for a message's content: text, a list of parts, or what they are made for"
        ),
    ] = "auto"
    generation_config: Annotated[
        str,
        Meta(
            description="'auto': sampling defaults from the model's generation_config.json; 'meshlm' (or 'vllm'): none; "
            "or a folder with that file",
            extra=PER_NODE,
        ),
    ] = "auto"
    override_generation_config: Annotated[
        str, Meta(description='JSON object over those defaults: {"temperature": 0.5}', extra=PER_NODE)
    ] = ""
    revision: Annotated[str, Meta(description="of a hub name: branch, tag or commit", extra=PER_NODE)] = ""
    tokenizer_revision: Annotated[
        str, Meta(description="of the tokenizer on the hub; empty: as the model's", extra=PER_NODE)
    ] = ""
    code_revision: Annotated[
        str, Meta(description="of the code that --trust-remote-code runs; empty: as the model's", extra=PER_NODE)
    ] = ""
    download_dir: Annotated[str, Meta(description="where hub names are downloaded to", extra=PER_NODE)] = ""
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16", "half", "float"],
        Meta(description="of weights and activations; auto: the model's on a GPU, float32 on the CPU"),
    ] = "auto"
    max_model_len: (
        Annotated[
            int,
            Meta(
                ge=AUTO_LEN,
                description="context length, prompt + output; default: the model's; auto or -1: that, as far as the KV cache has room",
                extra={"count": True, "auto": True},
            ),
        ]
        | None
    ) = None
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "pt", "dummy", "sharded_state"],
        Meta(description="format of the weights; dummy: random; sharded_state: what `meshlm save-sharded-state` wrote"),
    ] = "auto"
    model_impl: Annotated[
        Literal["auto", "meshlm", "transformers"],
        Meta(
            description="who computes the model: we, or the transformers library with our attention; auto: the library "
            "where we do not know the architecture"
        ),
    ] = "auto"
    trust_remote_code: Annotated[
        bool, Meta(description="run code that comes with the model, where --model-impl transformers needs it")
    ] = False
    quantization: Annotated[
        str,
        Meta(description="how the weights must be quantised; empty: as the model's files say", extra={"short": "-q"}),
    ] = ""
    gguf_weights: Annotated[
        Literal["auto", "packed", "decoded"],
        Meta(
            description="weights of a .gguf file in memory: as the file has them, or decoded while they are loaded; "
            "auto: packed on a CPU; on a GPU decoded where a useful KV cache has room beside them"
        ),
    ] = "auto"
    decoded_copy: Annotated[
        Literal["auto", "never", "always"],
        Meta(
            description="on a GPU keep packed weights of 4 or 8 bits (GPTQ, AWQ, ...) decoded, too, for steps of more than 16 tokens; "
            "auto: where the copy takes at most a quarter of what the weights leave for the KV cache"
        ),
    ] = "auto"
    cpu_offload_gb: Annotated[
        float,
        Meta(
            ge=0,
            description="GiB of each GPU's memory to save, at least: weights of linear layers that are not quantised stay in the "
            "host's memory and are copied to the GPU in every step",
        ),
    ] = 0.0
    cpu_offload_params: Annotated[
        tuple[str, ...],
        Meta(
            description="parts of the names of the weights that may, as mlp or gate_up_proj; all, where none is given"
        ),
    ] = ()
    cpu_exact: Annotated[
        bool,
        Meta(
            description="on a CPU products with the weights of a .gguf file are those of float32; without it activations are "
            "rounded to 16 bits for them (32 share a scale): a token takes less time, a long prompt more"
        ),
    ] = False
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        Meta(description="text, or vectors and scores of texts; auto: what the model was made for"),
    ] = "auto"
    convert: Annotated[
        Literal["auto", "none", "embed", "classify", "reward"],
        Meta(description="what the vectors are; auto: scores where the model has a classifier, else embeddings"),
    ] = "auto"
    task: Annotated[
        Literal["auto", "generate", "embed", "embedding", "classify", "score", "reward"],
        Meta(description="older vLLM's name for --runner and --convert together"),
    ] = "auto"
    pooler_config: Annotated[
        str, Meta(description='JSON object: how vectors are made, {"pooling_type": "MEAN", "dimensions": 256}')
    ] = ""
    hf_overrides: Annotated[str, Meta(description='JSON object over config.json: {"is_matryoshka": true}')] = ""
    seed: (
        Annotated[int, Meta(ge=0, description="of dummy weights, and of the seeds that requests without one get")]
        | None
    ) = None
