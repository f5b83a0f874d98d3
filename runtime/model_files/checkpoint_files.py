"""Finds the files of a folder that hold its weights, and reads what their headers say of each tensor, before any weight is read.

The supervisor calls it before a process starts; workers read the files that it chose. It imports no torch.
"""

import json
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from meshlm.architectures.packed_quantization import holds, stem_of
from meshlm.architectures.quantization import FP8, formats, is_mxfp4, scheme_of, while_loading
from meshlm.architectures.text_part import text_modules, text_tensor
from meshlm.protocol.model import QuantizationSpec
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.json_files import read_json
from meshlm.runtime.model_files.object_store import AnyPath

FLOATS = ("F64", "F32", "F16", "BF16")
"""The types of weights that are read, as safetensors writes them. Others are codes of quantised weights, not their values."""
SCALE_OF_KV_CACHE = re.compile(
    r"model\.layers\.(\d+)\.self_attn\."
    r"(?:(?:attn\.|qkv_proj\.|[kv]_proj\.)?(?P<one>k|v|kv)_scale|(?P<output>[kv])_proj\.output_scale|(?P<cache>[kv])_cache\.scale)"
)
DRAFT_VOCABULARY = ("d2t", "t2d")  # which tokens a drafter knows, of EAGLE 3
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_NEEDLESS = re.compile(
    r"(model\.)?((layers\.\d+\.(self_attn|attn|attention)\.)?rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)"
    r"|layers\.\d+\.(self_attn|attn|attention)\.(masked_)?bias"
    r"|layers\.\d+\.self_attn\.((attn\.|q_proj\.|qkv_proj\.)?q_scale|(attn\.)?prob_scale|q_proj\.output_scale))"
    r"|(\w+\.)?embeddings\.(position_ids|token_type_ids)"
)
_NO_WEIGHTS = re.compile(
    r"(sparse_linear|colbert_linear|training_args|optimizer.*|scheduler.*|scaler|rng_state.*|adapter_model.*|random_states.*)\.(bin|pt|safetensors)"
)
_OF_RANK = re.compile(r"model-rank-\d+-part-\d+\.safetensors")
_ENDINGS = {"safetensors": "*.safetensors", "pt": "*.bin"}
_INDEX = {"safetensors": "model.safetensors.index.json", "pt": "pytorch_model.bin.index.json"}

_QUANTISATION = ("quantization_config", "compression_config", "quantization")  # keys of a config.json

Format = Literal["safetensors", "pt"]


class TensorHeader(NamedTuple):
    """One tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]


class WeightFiles(NamedTuple):
    """The files with a folder's weights, in the order of their names, and what a user should know of the choice."""

    load_format: Format
    files: tuple[AnyPath, ...]
    notes: tuple[str, ...]


def is_needless(name: str) -> bool:
    """Tables that are computed here (rotary frequencies, attention masks), which older checkpoints hold; and scales for attention
    that computes in 8 bits, which none here does."""
    return _NEEDLESS.fullmatch(name) is not None


def weight_files(folder: AnyPath, wanted: str = "auto") -> WeightFiles:
    """safetensors where there are any, else .bin, else .pt; `wanted` may name one format. ModelFilesError."""
    found = {"safetensors": _chosen(folder, "safetensors"), "pt": _chosen(folder, "pt")}
    is_pt = wanted == "pt" or (wanted == "auto" and not found["safetensors"][0])
    load_format: Format = "pt" if is_pt else "safetensors"
    files, left_out = found[load_format]
    if any(_OF_RANK.fullmatch(file.name) for file in files):
        raise ModelFilesError(f"{folder}: it holds weights by rank; --load-format sharded_state reads them")
    if not files:
        raise ModelFilesError(f"{folder}: {_no_weights(folder, load_format if wanted != 'auto' else '')}")
    if load_format == "safetensors" and found["pt"][0]:
        left_out = (*left_out, *found["pt"][0])
    notes = (f"{folder}: {_some([file.name for file in left_out])} not read, {files[0].name} is",) if left_out else ()
    return WeightFiles(load_format, files, notes)


def shard_files(folder: Path, rank: int = 0) -> tuple[Path, ...]:
    """What `meshlm save-sharded-state` has written for a rank, part by part. ModelFilesError."""
    found = {int(file.stem.rpartition("-")[2]): file for file in folder.glob(f"model-rank-{rank}-part-*.safetensors")}
    if sorted(found) != list(range(len(found))) or not found:
        raise ModelFilesError(
            f"{folder}: model-rank-{rank}-part-{next(n for n in range(len(found) + 1) if n not in found)}.safetensors is not there; "
            "`meshlm save-sharded-state` writes such files"
        )
    return tuple(found[part] for part in range(len(found)))


def check_headers(
    weights: WeightFiles, folder: AnyPath, quantization: QuantizationSpec | None = None, *, of_text_part: bool = False
) -> None:
    """Files that are whole, tensors that one file holds and no two, of types that can be read. ModelFilesError.

    of_text_part: the types of tensors for images or sound are not looked at."""
    index = _index(folder, weights.load_format)
    if weights.load_format != "safetensors":
        return
    owner: dict[str, AnyPath] = {}
    for file in weights.files:
        tensors = read_header(file)
        if index is not None:
            _check_listed(file, set(tensors), {name for name, of in index.items() if of == file.name})
        for name in tensors:
            if name in owner:
                raise ModelFilesError(f"{file}: tensor {name} is in {owner[name].name} too")
            owner[name] = file
        own = {name: text_tensor(name) if of_text_part else name for name in tensors}
        check_types(file, ((name, tensors[key].dtype) for key, name in own.items() if name), quantization)


def quantised_encoder(weights: WeightFiles) -> str:
    """A tensor of the parts for images that is no floats; empty: all are. ModelFilesError."""
    files = weights.files if weights.load_format == "safetensors" else ()
    tensors = (one for file in files for one in read_header(file).items())
    odd = (name for name, header in tensors if text_tensor(name) is None and header.dtype not in FLOATS)
    return next((name for name in odd if not is_needless(name)), "")


def check_types(
    file: AnyPath, tensors: Iterable[tuple[str, str]], quantization: QuantizationSpec | None = None
) -> None:
    """Casting the codes of a quantised checkpoint to floats gives garbage. ModelFilesError."""
    bad = [
        (name, dtype)
        for name, dtype in tensors
        if dtype not in FLOATS
        and name not in DRAFT_VOCABULARY
        and not is_needless(name)
        and not (dtype == FP8 and scheme_of(quantization, name.removesuffix(".weight")) is not None)
        and not is_mxfp4(quantization, name, dtype)
        and not holds(scheme_of(quantization, stem_of(name)[0]), stem_of(name)[1], dtype)
    ]
    if bad:
        raise ModelFilesError(
            f"{file}: tensor {bad[0][0]} is of type {bad[0][1]}{_and_more(len(bad) - 1)}; weights must be float64, "
            f"float32, float16 or bfloat16, or what a quantization_config says that is read ({', '.join(formats())})"
        )


def read_header(file: AnyPath) -> dict[str, TensorHeader]:
    """The tensors of a safetensors file, which is as long as they need. ModelFilesError."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(size, MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        found = {
            name: TensorHeader(str(tensor["dtype"]), tuple(map(int, tensor["shape"])))
            for name, tensor in header.items()
        }
        end = 8 + length + max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
    except (OSError, struct.error, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ModelFilesError(f"{file}: cannot be read, perhaps cut short ({error or type(error).__name__})") from None
    if end > size:
        raise ModelFilesError(f"{file}: cannot be read, perhaps cut short ({size} bytes of {end})")
    return found


class Quantised(NamedTuple):
    """The place where a checkpoint says that its weights are quantised."""

    where: str  # file, and key
    said: str  # and how, for a message
    settings: Any

    def read(self, *, of_text_part: bool = False) -> QuantizationSpec:
        """Reads what it says. of_text_part: modules are named as in the outer model. ModelFilesError for what cannot be read."""
        found = formats().get(str(self.settings.get("quant_method"))) if isinstance(self.settings, dict) else None
        if found is None or ".json: " not in self.where:
            known = ", ".join(formats())
            raise ModelFilesError(f"{self.said}; supported: quantization_config with {known}, and GGUF files")
        try:
            read = found.read(self.settings)
            return msgspec.structs.replace(read, ignore=text_modules(read.ignore)) if of_text_part else read
        except ValueError as error:
            raise ModelFilesError(f"{self.where}: quant_method {found.name}: {error}") from None

    def while_loading(self, *, of_text_part: bool = False) -> QuantizationSpec:
        """The same quantisation of dummy weights. ModelFilesError where none can be made."""
        plain = """--hf-overrides '{"quantization_config": null}' serves plain dummy weights"""
        try:
            made = while_loading(self.read(of_text_part=of_text_part))
        except ModelFilesError as error:
            raise ModelFilesError(f"{error}; {plain}") from None
        if made is None:
            raise ModelFilesError(f"{self.said}, and dummy weights of that kind cannot be made; {plain}")
        return made

    def notes(self) -> tuple[str, ...]:
        """The notes about it that a user should read."""
        if not self.settings.get("kv_cache_scheme"):
            return ()
        text = "the KV cache is FP8 only with --kv-cache-dtype fp8, then with the file's scales"
        return (f"{self.where}: kv_cache_scheme: {text}",)


def quantisation(folder: Path, config: dict[str, Any]) -> Quantised | None:
    """The first place that says it; None where nothing does. ModelFilesError."""
    inner = config.get("text_config")
    settings = [(f"{folder}/config.json", config), (f"{folder}/config.json: text_config", inner)]
    for name in ("hf_quant_config.json", "quantize_config.json", "quant_config.json"):
        if (folder / name).is_file():
            settings.append((f"{folder}/{name}", {name: read_json(folder / name)}))
    for where, holder in settings:
        for key, value in holder.items() if isinstance(holder, dict) else ():
            if (key in _QUANTISATION or key.endswith(".json")) and value and not _only_of_kv_cache(value):
                where = where if key.endswith(".json") else f"{where}: {key}"
                return Quantised(where, f"{where}: the weights are quantised{_method(value)}", value)
    return None


def _only_of_kv_cache(settings: Any) -> bool:
    """Some checkpoints have plain weights and scales for an FP8 cache."""
    inner = settings.get("quantization", settings) if isinstance(settings, dict) else None
    if not isinstance(inner, dict):
        return False
    algorithm = "quant_algo" in inner and inner["quant_algo"] is None and bool(inner.get("kv_cache_quant_algo"))
    scheme = inner.get("quant_method") == "compressed-tensors" and not inner.get("config_groups", True)
    return algorithm or (scheme and bool(inner.get("kv_cache_scheme")))


def _method(settings: Any) -> str:
    inner = settings.get("quantization", settings) if isinstance(settings, dict) else {}
    names = ("quant_method", "quant_algo", "load_in_8bit", "load_in_4bit", "bits", "w_bit")
    said = next((f" ({name} {inner[name]!r})" for name in names if isinstance(inner, dict) and inner.get(name)), "")
    return said[:80]


def _chosen(folder: AnyPath, load_format: Format) -> tuple[tuple[AnyPath, ...], tuple[AnyPath, ...]]:
    """Files of this format with the model's weights, and files of it that are left out."""
    index = _index(folder, load_format)
    there = sorted(file for file in folder.glob(_ENDINGS[load_format]) if not _NO_WEIGHTS.fullmatch(file.name))
    if index is not None:
        names = sorted(set(index.values()))
        lost = [name for name in names if not (folder / name).is_file()]
        if lost:
            raise ModelFilesError(f"{folder}/{_INDEX[load_format]}: it lists {_some(lost)} not there")
        return tuple(folder / name for name in names), tuple(file for file in there if file.name not in names)
    if load_format == "pt" and not there:
        there = sorted(file for file in folder.glob("*.pt") if not _NO_WEIGHTS.fullmatch(file.name))
    # Mistral's repositories hold the same weights a second time, in files and with names of their own.
    weights = tuple(file for file in there if not file.name.startswith("consolidated"))
    return weights, tuple(file for file in there if file not in weights) if weights else ()


def _index(folder: AnyPath, load_format: Format) -> dict[str, str] | None:
    """The file of each tensor; None where no index names them. ModelFilesError for a broken index."""
    path = folder / _INDEX[load_format]
    if not path.is_file():
        return None
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelFilesError(f"{path}: it has no weight_map")
    for name in listed.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelFilesError(f"{path}: {name!r} is no name of a file in this folder")
    return listed


def _check_listed(file: AnyPath, held: set[str], listed: set[str]) -> None:
    if held == listed:
        return
    more, lost = sorted(held - listed), sorted(listed - held)
    verb, names, listing = ("lacks", lost, "lists") if lost else ("holds", more, "does not list")
    what = f"it {verb} tensor {names[0]}{_and_more(len(names) - 1)}, which the index {listing}"
    raise ModelFilesError(f"{file}: {what}")


def _no_weights(folder: AnyPath, load_format: str) -> str:
    if (folder / "adapter_config.json").is_file():
        return "it holds an adapter (adapter_config.json) and no model; give the model's folder, and this one to --lora-modules"
    if any(folder.glob("consolidated*.safetensors")) or any(folder.glob("*.pth")):
        return "its weights are in a format of their own (consolidated*, *.pth); give the folder in the format of transformers"
    if load_format:
        return f"--load-format {load_format}: no {'*.safetensors' if load_format == 'safetensors' else '*.bin or *.pt'} there"
    return "no weights (*.safetensors, *.bin or *.pt) there; --load-format dummy runs without"


def _and_more(count: int) -> str:
    return f" (and {count} more)" if count else ""


def _some(names: list[str]) -> str:
    """Names of files with a verb: at most three."""
    shown = ", ".join(names[:3]) + _and_more(len(names) - 3 if len(names) > 3 else 0)
    return f"{shown} {'is' if len(names) == 1 else 'are'}"
