"""A model family: how its files describe a model, and which weights that model has.

One module of this folder per family makes a `Family`; registry.py finds it by the architecture's name. The supervisor reads it before a
process starts, workers while they load. How the family computes is in workers/models/.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from meshlm.protocol.model import ModelSpec


class Split(Enum):
    """The way in which tensor-parallel ranks split one dimension of a tensor."""

    REPLICATED = "replicated"  # every rank has all of it
    FIRST_RANK = "first_rank"  # a bias of a row-parallel product: the sum over the ranks must have it once
    VOCABULARY = "vocabulary"
    QUERY_HEADS = "query_heads"
    KV_HEADS = "kv_heads"
    INTERMEDIATE = "intermediate"
    STATE_GROUPS = "state_groups"
    EXPERT = "expert"  # an expert's own INTERMEDIATE, which is whole where each rank has some of the experts


class Serves(Enum):
    """The tasks that a family's models do for clients."""

    TEXT = "text"  # they go on with a text
    VECTORS = "vectors"  # one of a text, or one of each of its tokens
    CLASSES = "classes"  # scores of a text, or of each of its tokens
    TOKEN_CLASSES = "token_classes"
    REWARDS = "rewards"  # scores of each of a text's tokens, or of the last
    TRANSCRIPTIONS = "transcriptions"
    DRAFTS = "drafts"  # for another model, and nothing for clients


class Layout(Enum):
    """How a family's files hold a tensor of a layer, where it is not a row for each output."""

    TRANSPOSED = "transposed"  # a row for each input
    BY_GROUP = "by_group"  # the rows of query, key and value by key-value head: its query heads, its key, its value


class Weight(NamedTuple):
    """One tensor of a checkpoint, and the parameter of the module that it fills. Weights that name the same parameter are packed
    into it, one below the other, in the order in which the family lists them."""

    name: str  # Hugging Face's
    gguf: str  # llama.cpp's
    parameter: str  # within its layer, or within the model
    shape: tuple[int, ...]
    split: Split = Split.REPLICATED
    dim: int = 0  # the dimension that is split
    plus: float = 0.0  # what the parameter has more than the tensor; a .gguf file holds the sum
    layer: int | None = None
    times: float = 1.0  # the parameter is the tensor multiplied by this
    quantises: bool = True  # False: files hold it in full, whatever their quantization_config says
    neighbours: tuple[int, int] = (0, 0)
    """The rows of a head, and how many of them, from the first on, a checkpoint has for rotating neighbours; we rotate halves."""
    beside: bool = False  # weights of the same parameter stand beside one another, by columns
    expert: int | None = None  # the parameter has this matrix for each expert; llama.cpp's tensor holds those of all
    integers: bool = False  # files hold whole numbers


class GGUFMetadata(NamedTuple):
    kind: str  # general.architecture, which is the prefix of the other keys
    fields: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]  # of tensors, as Hugging Face has them
    rope_factors: tuple[float, ...]  # rope_freqs.weight, where the file has it
    # rope_factors_short.weight, rope_factors_long.weight
    long_factors: tuple[tuple[float, ...], tuple[float, ...]] = (), ()

    def get(self, key: str, default: Any = None) -> Any:
        """ValueError where the key is missing and has no default."""
        value = self.fields.get(f"{self.kind}.{key}", default)
        if value is None:
            raise MetadataError(f"metadata {self.kind}.{key} is missing")
        return value

    def has(self, name: str) -> bool:
        """Whether some layer has a tensor of this name."""
        return any(found.endswith(f".{name}") for found in self.shapes)


class MetadataError(ValueError):
    """The metadata of a .gguf file describes no model that can be served; the text says why."""


class GGUFFamily(NamedTuple):
    kind: str  # general.architecture
    spec: Callable[[GGUFMetadata, str], ModelSpec]  # the name of the architecture goes in too
    keys: frozenset[str] = frozenset()  # that it honours beyond those of all families, without the kind before them
    experts: bool = False  # its files have an expert_count; another family of this kind has files without
    packed: Mapping[str, tuple[str, ...]] = {}  # stems of tensors that hold several weights, one below the other
    delta_by_kind: bool = False  # rows of a gated delta net stand by kind (queries, keys, values, gates), not by head
    interleaved_heads: bool = False  # rows of query and key heads are stored for rotating neighbours; we rotate halves


def stem_of(architecture: str) -> str:
    """The name that a decoder of text shares with the same decoder for vectors and classes; "" where it has no such name."""
    ending = next((one for one in ("ForCausalLM", "LMHeadModel") if architecture.endswith(one)), "")
    return architecture.removesuffix(ending) if ending else ""


class ExpertTensors(NamedTuple):
    """How a family's files hold the matrices of all experts of a layer in one tensor, each with a row for each input. A tensor
    `<gate_up>` is [experts, hidden, gate and up], `<down>` [experts, wide, hidden]. Names stand behind that of the layer. Each may
    have a `_bias`, and MXFP4 codes and scales in `_blocks` and `_scales`, whose rows are outputs."""

    expert: (
        str  # with {} for its number: what stands before gate_proj, up_proj and down_proj among the family's weights
    )
    gate_up: str
    down: str
    interleaved: bool  # gate and up take turns; otherwise the one comes behind the other


class NextN(NamedTuple):
    """The layers of a checkpoint that draft further tokens (mtp): what computes them, and what their tensors are called."""

    model: str  # module and class
    prefix: str = ""  # of all their names; "": they are the layers behind the model's last, with their own tensors among a layer's
    embedding_norm: str = "enorm"
    state_norm: str = "hnorm"
    projection: str = "eh_proj"
    norm: str = "shared_head.norm"


class Family(NamedTuple):
    architecture: str  # in `architectures` of a config.json
    model_type: str  # that such a config.json has
    # of a config.json with the defaults filled in, and the architecture's name
    spec: Callable[[dict[str, Any], str], ModelSpec]
    weights: Callable[[ModelSpec], Iterator[Weight]]
    other_model_types: frozenset[str] = frozenset()  # of models that use this class as it is
    keys: frozenset[str] = frozenset()  # of config.json that it honours beyond those of all families
    defaults: Mapping[str, Any] = {}  # what transformers' class takes for missing keys, where it differs from Llama's

    packed: Mapping[str, tuple[str, ...]] = {}
    """Tensors of a layer that hold several weights, one below the other: the stem of their name, and those of the weights. A stem with
    {} is of a tensor that holds those of all experts."""
    experts: ExpertTensors | None = None
    layouts: Mapping[str, Layout] = {}  # of tensors of a layer, by the stem of their renamed names; not in .gguf files
    gguf: GGUFFamily | None = None
    serves: Serves = Serves.TEXT
    float16: bool = True  # whether its numbers fit
    compiles: bool = True  # whether --compile inductor knows its layers (workers/models/compiled.py)
    model: str = "meshlm.workers.models.decoder:Decoder"  # module and class that compute it
    rename: Callable[[str], str] | None = None  # of a file's tensor, to the name that `weights` has
    # --tool-call-parser and --reasoning-parser of its chats, where none is asked for
    parsers: tuple[str, str] = "", ""
    unread: str = ""  # a regular expression for renamed tensors that other tasks need
    nextn: NextN | None = None  # where checkpoints have layers that draft
