"""What the supervisor found out about the model before any other process started."""

from typing import Literal

from msgspec import Struct

from meshlm.protocol.adapters import Adapter
from meshlm.protocol.audio import SpeechTokens
from meshlm.protocol.model import ModelSpec
from meshlm.protocol.pooling import PoolingSpec
from meshlm.protocol.weights import WeightsVersion


class Resolved(Struct, frozen=True, kw_only=True):
    """The facts that the supervisor finds out once, so that no child has to. None of them is a flag."""

    spec: ModelSpec
    model_path: str  # folder or .gguf file
    weights_url: str = ""  # of object storage, where the weights are; empty: they are at model_path
    weights_digest: str = ""  # of the files at model_path, as they were at the start; empty: they are not looked at
    tokenizer_path: str  # folder, tokenizer.json or .gguf file
    chat_templates: dict[str, str]  # Jinja sources by name; none if the model has none
    served_names: tuple[str, ...]
    generation_defaults: dict[str, float | int]  # temperature, top_p, top_k, min_p, repetition_penalty, max_tokens
    max_output_tokens: int | None = None  # that no request passes, by a generation config that the user gave
    load_format: Literal["safetensors", "gguf", "pt", "dummy", "sharded_state"]
    device: str  # a platform (runtime/platforms.py)
    dtype: Literal["float32", "float16", "bfloat16"]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    num_speculative_tokens: int = 0  # that are drafted for a request and step, at most
    logits_processors: tuple[str, ...] = ()  # module:Class, of --logits-processors and of installed packages
    general_plugins: bool = False  # there are some, which every process calls first
    stat_loggers: bool = False  # there are some, which frontends tell of figures
    renders_only: bool = False  # texts and templates without a model: no rank is there (meshlm launch render)
    speech: SpeechTokens | None = None  # of a model that transcribes audio, and serves nothing else
    pooling: PoolingSpec | None = None  # what its vectors are, where it serves those and no text
    transfers_kv: bool = False  # connectors move KV between meshes
    kv_remote_hosts: tuple[str, ...] | None = None  # that requests may name; None: a plug-in judges
    drafter: "Resolved | None" = None  # the model that drafts tokens for this one
    adapters: tuple[Adapter, ...] = ()  # that are there from the start
    digest: str  # of everything above and the flags: names a run's configuration in logs

    @property
    def weights(self) -> WeightsVersion:
        """The weights with which the mesh begins."""
        return WeightsVersion(0, source=self.model_path, digest=self.weights_digest)
