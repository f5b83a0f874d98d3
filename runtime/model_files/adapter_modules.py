"""The modules of a model that an adapter changes, and how: what an adapter's tensors are, by their names and shapes. No torch.

peft names tensors by the module, and by what they are in it: lora_A and lora_B of a linear layer (with DoRA its magnitudes),
lora_embedding_A [rank, tokens] and lora_embedding_B [hidden, rank] of the table of embeddings, `weight` and `bias` of a module that was
trained whole (modules_to_save), trainable_tokens_delta of rows of a table that were trained. adapter_experts.py has those of experts.
Called by adapter_files.py.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshlm.architectures.family import Layout, Weight
from meshlm.architectures.registry import family_of, weights_of
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.adapter_experts import StackedExperts, find_pair, is_of_all, sizes_of_all
from meshlm.runtime.model_files.adapter_tensors import EXPONENTS
from meshlm.runtime.model_files.checkpoint_files import TensorHeader

CONFIG = "adapter_config.json"
EMBEDDING, HEAD = "embed.weight", "head.weight"
"""Parameters of the model outside its layers."""
_KINDS = {
    "A": r"lora_A(\.default)?\.weight",
    "B": r"lora_B(\.default)?\.weight",
    "M": r"lora_magnitude_vector(\.default)?(\.weight)?",
    "EA": r"lora_embedding_A(\.default)?",
    "EB": r"lora_embedding_B(\.default)?",
    "T": r"token_adapter\.trainable_tokens_delta(\.default)?",
    "W": r"((token_adapter\.)?base_layer\.|modules_to_save\.(default\.)?|original_module\.)?weight",
    "V": r"(modules_to_save\.(default\.)?)?bias",
}
_TENSORS = {kind: re.compile(rf"(base_model\.model\.)?(?P<module>.+?)\.{pattern}") for kind, pattern in _KINDS.items()}
_VECTORS = ("M", "V")
_WORDS = {
    "A": "lora_A", "B": "lora_B", "M": "lora_magnitude_vector, which use_dora needs",
    "EA": "lora_embedding_A", "EB": "lora_embedding_B",
}  # fmt: skip
_OF_LAYER = re.compile(r"(?P<layer>(?:model\.)?layers\.\d+)\.(?P<stem>.+)")
_PARAMETERS = re.compile(r"(attention\.(qkv|o|q_b)|mlp\.(shared\.)?(gate_up|up|down))\.weight")
"""Of a layer, the parameters whose products all families compute by `Linear`."""
_HEADS = ("lm_head", "embed_out")  # of tied heads, which have no weight of their own

Names = dict[str, str]
"""The tensors of one module, by their kinds."""


class AdaptedModule(NamedTuple):
    """One module of the model, and the names of its tensors; "": it has none. `weights`: the base's that it has, one below the other;
    of a tied head that of the embeddings."""

    name: str
    a: str
    b: str
    rank: int
    scale: float
    weights: tuple[str, ...]
    magnitude: str = ""  # of DoRA
    parameter: str = ""  # EMBEDDING, HEAD, or "": it is in a layer
    whole: str = ""  # the weight that it has instead of the base's
    bias: str = ""  # and the bias
    rows: str = ""  # what some rows of the table are instead ...
    row_ids: tuple[int, ...] = ()  # ... and which
    is_transposed: bool = False  # `whole` has a row for each input
    experts: StackedExperts | None = None  # whose matrices A and B hold; None: it is no expert's


def adapted_modules(
    file: Path, config: dict[str, Any], headers: Mapping[str, TensorHeader], spec: ModelSpec
) -> Iterator[AdaptedModule]:
    """The changed modules, in the order of their names. ModelFilesError."""
    found: dict[str, Names] = {}
    for name, header in headers.items():
        kind, module = _kind_of(file, name)
        dimensions = 1 if kind in _VECTORS else 2
        if header.dtype not in EXPONENTS or len(header.shape) != dimensions:
            what = "a matrix" if dimensions > 1 else "a vector"
            raise ModelFilesError(
                f"{file}: tensor {name} is {header.dtype} {header.shape}; {what} of floats is expected"
            )
        found.setdefault(module, {})[kind] = name
    if not found:
        raise ModelFilesError(f"{file}: it holds no tensor")
    for module, names in sorted(found.items()):
        found_module = _Module(file, config, headers, spec, module, names)
        yield from found_module.read_experts() if is_of_all(module, spec) else found_module.read()


def _kind_of(file: Path, name: str) -> tuple[str, str]:
    for kind, pattern in _TENSORS.items():
        if match := pattern.fullmatch(name):
            return kind, match["module"]
    raise ModelFilesError(f"{file}: tensor {name} is no lora_A or lora_B of a module")


class _Module(NamedTuple):
    """One module while it is held against the model."""

    file: Path
    config: dict[str, Any]
    headers: Mapping[str, TensorHeader]
    spec: ModelSpec
    name: str
    names: Names

    def error(self, text: str) -> ModelFilesError:
        return ModelFilesError(f"{self.file}: {self.name}{text}")

    def read(self) -> Iterator[AdaptedModule]:
        """One module; of rows of a tied table two."""
        parameter, weights = _weights_of_module(self.name, self.spec)
        if not weights:
            raise self.error(
                f": this model ({self.spec.architecture}) has no such module, or none that adapters change"
            )
        is_experts = weights[0].expert is not None
        if is_experts:
            self._check_experts()
        a, b = self._pair(parameter)
        outputs, inputs = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        rank = self.headers[a].shape[0] if a else 0
        if a:
            self._check_pair(a, b, (outputs, inputs) if parameter != EMBEDDING else (inputs, outputs))
        self._check_vector("M", "magnitudes", outputs)
        self._check_whole(weights, (outputs, inputs))
        ids = self._row_ids(outputs, inputs) if "T" in self.names else ()
        scale = _scale(self.file, self.config, self.name, rank) if a else 0.0
        get = self.names.get
        found = AdaptedModule(
            self.name, a, b, rank, scale, tuple(weight.name for weight in weights), get("M", ""), parameter,
            get("W", ""), get("V", ""), get("T", ""), ids, _layout(weights[0].name, self.spec) is Layout.TRANSPOSED,
            StackedExperts(1) if is_experts else None,
        )  # fmt: skip
        yield found
        if ids and parameter == EMBEDDING and self.spec.tie_word_embeddings:  # the head has the same rows
            yield AdaptedModule(_HEADS[0], "", "", 0, 0.0, found.weights, parameter=HEAD, rows=found.rows, row_ids=ids)

    def read_experts(self) -> Iterator[AdaptedModule]:
        """What one pair of tensors changes of all experts of a layer."""
        self._check_experts()
        a, b = self._pair("")
        shapes = self.headers[a].shape, self.headers[b].shape
        found = find_pair(self.name, *shapes, self.spec)
        if found is None:
            raise self.error(
                f" has {shapes[0]} and {shapes[1]}; for this model they must be {sizes_of_all(self.name, self.spec)}"
            )
        name = f"{re.sub(r'([.]base_layer)+$', '', self.name)}.{found.parameter}"
        scale = _scale(self.file, self.config, name, found.rank)
        yield AdaptedModule(name, a, b, found.rank, scale, found.weights, experts=found.stacked)

    def _check_experts(self) -> None:
        if self.config.get("use_dora") or "M" in self.names:
            raise self.error(": DoRA of experts is not there; adapt them without use_dora")
        if other := self.names.keys() - {"A", "B"}:
            raise self.error(f" has {self.names[min(other)]}; experts are adapted by lora_A and lora_B alone")

    def _pair(self, parameter: str) -> tuple[str, str]:
        """The names of A and B, where the module has them."""
        names, kinds = self.names, ("EA", "EB") if parameter == EMBEDDING else ("A", "B")
        if "EA" in names or "EB" in names if parameter != EMBEDDING else "A" in names or "B" in names:
            raise self.error(" has matrices of another kind of module")
        if parameter and "M" in names:
            raise self.error(": DoRA of embeddings and heads is not there; adapt them without use_dora")
        has_pair = any(kind in names for kind in kinds)
        dora = ("M",) if self.config.get("use_dora") and has_pair and not parameter else ()
        if missing := [kind for kind in (*kinds, *dora) if kind not in names]:
            if has_pair or not ({"W", "T"} & names.keys()):
                raise self.error(f" has no {_WORDS[missing[0]]}")
        elif "M" in names and not dora:
            raise self.error(f" has magnitudes, and {CONFIG} does not say use_dora")
        return (names[kinds[0]], names[kinds[1]]) if has_pair else ("", "")

    def _check_pair(self, a: str, b: str, sizes: tuple[int, int]) -> None:
        (outputs, inputs), given = sizes, (self.headers[a].shape, self.headers[b].shape)
        rank = given[0][0]
        if given[0][1] != inputs or given[1] != (outputs, rank) or not rank:
            text = (
                f"has A {given[0]} and B {given[1]}; for this model they must be (rank, {inputs}) and ({outputs}, rank)"
            )
            raise self.error(f" {text}")

    def _check_vector(self, kind: str, what: str, size: int) -> None:
        if kind in self.names and self.headers[self.names[kind]].shape != (size,):
            given = self.headers[self.names[kind]].shape
            raise self.error(f" has {what} {given}; for this model they must be ({size},)")

    def _check_whole(self, weights: list[Weight], sizes: tuple[int, int]) -> None:
        """A module that was trained whole has what the base's has: a weight, and a bias where that has one."""
        names, known = self.names, weights_of(self.spec)
        if "W" not in names and "V" not in names:
            return
        wanted = sizes[::-1] if _layout(weights[0].name, self.spec) is Layout.TRANSPOSED else sizes
        if "W" in names and self.headers[names["W"]].shape != wanted:
            given = self.headers[names["W"]].shape
            raise self.error(f" has a weight {given}; for this model it must be {wanted}")
        biased = all(f"{weight.name.removesuffix('.weight')}.bias" in known for weight in weights)
        if "W" not in names or ("V" in names) != biased:
            has = "a weight and a bias" if biased else "a weight and no bias"
            raise self.error(f" was trained whole; the base's module has {has}, and so must the adapter's")
        self._check_vector("V", "a bias", sizes[0])

    def _row_ids(self, outputs: int, inputs: int) -> tuple[int, ...]:
        asked, shape = self.config.get("trainable_token_indices"), self.headers[self.names["T"]].shape
        if isinstance(asked, dict):
            asked = next((ids for key, ids in asked.items() if f".{self.name}".endswith(f".{key}")), None)
        whole = isinstance(asked, list) and all(type(one) is int and 0 <= one < outputs for one in asked)
        if not whole or not isinstance(asked, list) or len(set(asked)) != len(asked):
            raise self.error(
                f": trainable_token_indices of {CONFIG} does not say which of the {outputs} tokens were trained"
            )
        if shape != (len(asked), inputs):
            raise self.error(
                f" has {shape} of tokens that were trained; for this model they must be ({len(asked)}, {inputs})"
            )
        return tuple(asked)


def _weights_of_module(module: str, spec: ModelSpec) -> tuple[str, list[Weight]]:
    """Which it is of the parameters outside the layers ("": it is in a layer), and the base's weights that it holds, in order; none
    where there is no such linear layer or table."""
    known, family = weights_of(spec), family_of(spec.architecture)
    assert family is not None
    for name in (f"{module}.weight", f"model.{module}.weight"):
        own = family.rename(name) if family.rename is not None else name
        if own in known:
            weight = known[own]
            if weight.expert is not None:
                return "", [weight]
            if weight.layer is None and weight.parameter in (EMBEDDING, HEAD) and not weight.integers:
                return weight.parameter, [weight]
            return "", [weight] if is_adaptable(weight) and _layout(own, spec) is not Layout.BY_GROUP else []
        match = _OF_LAYER.fullmatch(own.removesuffix(".weight"))
        stems = family.packed.get(match["stem"], ()) if match is not None else ()
        names = [f"{match['layer']}.{stem}.weight" for stem in stems] if match is not None else []
        if names and all(one in known and is_adaptable(known[one]) for one in names):
            laid_out = match is not None and family.layouts.get(match["stem"]) is Layout.BY_GROUP
            return "", [] if laid_out else [known[one] for one in names]
    if module in _HEADS and spec.tie_word_embeddings:
        tables = [one for one in known.values() if one.layer is None and one.parameter == EMBEDDING]
        return HEAD, tables[:1]
    return "", []


def is_adaptable(weight: Weight) -> bool:
    """Whether it is a linear layer's, of those that adapters may change."""
    whole = weight.expert is None and not weight.beside and len(weight.shape) == 2
    return whole and weight.layer is not None and _PARAMETERS.fullmatch(weight.parameter) is not None


def _layout(name: str, spec: ModelSpec) -> Layout | None:
    """How files hold a tensor of a layer, where it is not a row for each output. (B has a row for each output in any case.)"""
    family, match = family_of(spec.architecture), _OF_LAYER.fullmatch(name.removesuffix(".weight"))
    return None if match is None or family is None else family.layouts.get(match["stem"])


def _scale(file: Path, config: dict[str, Any], module: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank); alpha_pattern has that of some modules, by a regular expression for their names' ends."""
    patterns = config.get("alpha_pattern") or {}
    alpha = config.get("lora_alpha", 8)
    try:
        key = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)
        found = float(alpha if key is None else patterns[key])
    except (re.error, TypeError, ValueError, AttributeError) as error:
        raise ModelFilesError(f"{file.parent / CONFIG}: lora_alpha or alpha_pattern is not read ({error})") from None
    return found / (rank**0.5 if config.get("use_rslora") else rank)
