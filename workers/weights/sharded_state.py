"""The weights of one worker as it has them, in files of their own: saved once, read without what other ranks need.

    model-rank-{rank}-part-{part}.safetensors      vLLM's names of files; the tensors are this worker's parameters before `prepare`

A file says what it was made for: ranks, dtype, quantisation. `python -m meshlm.workers.weights.sharded_state` saves one rank; `meshlm
save-sharded-state` runs it for each. Read by load.py.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.runtime.model_files.checkpoint_files import shard_files
from meshlm.runtime.sharded_state import Request
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.models.decoder import Attention, Decoder, DecoderLayer
from meshlm.workers.weights.sources import opened_file

_KEY = "meshlm"
# Of packed tensors; another one where kernels read them in another order (1: kernels/packed_experts/layout.py)
LAYOUT = 1


class _Made(msgspec.Struct, frozen=True, kw_only=True):
    """The model and rank that files were made for."""

    architecture: str
    dtype: str
    quantization: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    rank: int
    layout: int = 0
    kv_scales: tuple[tuple[float | None, float | None], ...] = ()  # by layer of this worker


def _made(resolved: Resolved, shard: Shard) -> _Made:
    spec = resolved.spec
    return _Made(
        architecture=spec.architecture, dtype=resolved.dtype,
        quantization="" if spec.quantization is None else spec.quantization.method, tensor_parallel_size=shard.tp_size,
        pipeline_parallel_size=shard.pp_size, rank=shard.rank, layout=LAYOUT,
    )  # fmt: skip


def save(model: Decoder, resolved: Resolved, folder: Path, max_bytes: int) -> None:
    """Writes the parameters of a model that is loaded, but not prepared, into files of about `max_bytes`."""
    from safetensors.torch import save_file

    made = msgspec.structs.replace(_made(resolved, model.shard), kv_scales=tuple(model.kv_scales()))
    said = {_KEY: msgspec.json.encode(made).decode(), "format": "pt"}
    for part, tensors in enumerate(_parts(model, max_bytes)):
        save_file(tensors, folder / f"model-rank-{model.shard.rank}-part-{part}.safetensors", metadata=said)


def _parts(model: Decoder, max_bytes: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, parameter in model.named_parameters():
        if part and size + parameter.nbytes > max_bytes:
            yield part
            part, size = {}, 0
        part[name] = parameter.data.contiguous()
        size += parameter.nbytes
    yield part


def fill(model: Decoder, resolved: Resolved, progress: Callable[[int, int], None]) -> None:
    """Fills the parameters. ProcessFatal names the file, and what does not fit this worker."""
    files = _files(model, resolved)
    missing = dict(model.named_parameters())
    total, done = sum(parameter.nbytes for parameter in missing.values()), 0
    progress(0, total)
    for file in files:
        with opened_file(file, torch.device("cpu")) as opened:
            made = _made_for(file, (opened.metadata() or {}).get(_KEY, ""), model, resolved)
            for layer, scales in zip(model.layers, made.kv_scales, strict=True):
                if isinstance(layer, DecoderLayer) and isinstance(layer.attention, Attention):
                    layer.attention.kv_scale = scales
            for name in opened.keys():  # noqa: SIM118 - not a dict
                parameter = missing.pop(name, None)
                if parameter is None:
                    raise ProcessFatal(f"{file}: tensor {name} is not of this worker, or in another part, too")
                tensor = opened.get_tensor(name)
                if (tensor.shape, tensor.dtype) != (parameter.shape, parameter.dtype):
                    raise ProcessFatal(
                        f"{file}: tensor {name} is {tensor.dtype} {tuple(tensor.shape)}; this worker has "
                        f"{parameter.dtype} {tuple(parameter.shape)}"
                    )
                parameter.data.copy_(tensor)
                done += tensor.nbytes
        progress(done, total)
    if missing:
        raise ProcessFatal(f"{files[0]}: tensor {sorted(missing)[0]} is missing (and {len(missing) - 1} more)")


def check(model: Decoder, resolved: Resolved) -> None:
    """ProcessFatal names a file that is not there, or was made for another worker. Their headers alone are read."""
    for file in _files(model, resolved):
        with opened_file(file, torch.device("cpu")) as opened:
            _made_for(file, (opened.metadata() or {}).get(_KEY, ""), model, resolved)


def _files(model: Decoder, resolved: Resolved) -> tuple[Path, ...]:
    try:
        return shard_files(Path(resolved.model_path), model.shard.rank)
    except ModelFilesError as error:
        raise ProcessFatal(str(error)) from None


def _made_for(file: Path, said: str, model: Decoder, resolved: Resolved) -> _Made:
    """Reads what the file says of itself. Refuses one that was made for another worker."""
    try:
        found = msgspec.json.decode(said, type=_Made)
    except msgspec.MsgspecError:
        raise ProcessFatal(f"{file}: `meshlm save-sharded-state` has not written it") from None
    wanted = _made(resolved, model.shard)
    for name in _Made.__struct_fields__[:-1]:
        if getattr(found, name) != getattr(wanted, name):
            raise ProcessFatal(
                f"{file}: it was saved for {name} {getattr(found, name)!r}, and {getattr(wanted, name)!r} is wanted"
            )
    return found


def main() -> None:
    """Saves one rank. The answer is an error, or nothing."""
    from meshlm.workers.weights.load import load_model

    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    try:
        save_rank(request.config, request.rank, Path(request.folder), request.max_bytes, load_model)
    except ProcessFatal as error:
        sys.stdout.write("\n" + json.dumps({"error": str(error)}) + "\n")


def save_rank(config: MeshConfig, rank: int, folder: Path, max_bytes: int, load_model: Callable[..., Decoder]) -> None:
    """Loads on the CPU what this rank has, whatever device serves it, and saves it."""
    resolved = config.require_resolved()
    with torch.inference_mode():
        shard = Shard.of_worker(config.parallel, rank)
        given = resolved, torch.device("cpu"), config.model.seed or 0, lambda done, total: None, shard
        model = load_model(*given, prepare=False)
        save(model, resolved, folder, max_bytes)


if __name__ == "__main__":
    main()
