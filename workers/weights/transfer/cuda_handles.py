"""A trainer's tensors on the same GPU, by CUDA's handles, as vLLM's trainers send them: a base64 text of a pickle, which is read and
not run. For each tensor it has the arguments with which torch opens another process's memory, by the GPU's UUID.
"""

import base64
import binascii
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshlm.protocol.weight_transfer import TensorInfo
from meshlm.runtime.plain_pickle import Called, Named, NotPlain, read
from meshlm.workers.weights.transfer.source import TransferFailed

FIELD = "update_info.ipc_handles_pickled"
REBUILD = Named("torch.multiprocessing.reductions", "rebuild_cuda_tensor")
STORAGES = (Named("torch.storage", "UntypedStorage"), Named("torch.storage", "TypedStorage"))
TENSORS = (Named("torch", "Tensor"), Named("torch._tensor", "Tensor"), Named("torch.nn.parameter", "Parameter"))
NUM_ARGUMENTS = 15


def receive(
    text: str, tensors: tuple[TensorInfo, ...], device: torch.device
) -> Iterator[tuple[list[TensorInfo], Tensor]]:
    """As WeightSource.receive."""
    handles = parsed(text, tensors)
    if device.type != "cuda":
        raise TransferFailed(f"{FIELD}: CUDA's handles need --device cuda; buckets are for the host's memory")
    torch.cuda.set_device(device)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    for tensor, by_gpu in zip(tensors, handles, strict=True):
        if uuid not in by_gpu:
            raise TransferFailed(f"{FIELD}: {tensor.name} is on GPU {', '.join(by_gpu)}, and this worker's is {uuid}")
        yield [tensor], _opened(by_gpu[uuid], tensor, device).contiguous().view(torch.uint8).reshape(-1)
        torch.cuda.synchronize(device)


def parsed(text: str, tensors: tuple[TensorInfo, ...]) -> list[dict[str, tuple[Any, ...]]]:
    """For each tensor the arguments of `rebuild_cuda_tensor`, by the UUID of a GPU. TransferFailed."""
    try:
        found = read(base64.b64decode(text, validate=True))
    except (NotPlain, binascii.Error) as error:
        raise TransferFailed(f"{FIELD}: {error}") from None
    if not isinstance(found, list) or len(found) != len(tensors):
        raise TransferFailed(f"{FIELD}: a list with an entry for each of the {len(tensors)} names is expected")
    return [_by_gpu(one, tensor) for one, tensor in zip(found, tensors, strict=True)]


def _by_gpu(entry: Any, tensor: TensorInfo) -> dict[str, tuple[Any, ...]]:
    if not isinstance(entry, dict) or not entry or not all(isinstance(uuid, str) for uuid in entry):
        raise TransferFailed(f"{FIELD}: {tensor.name}: handles by the UUID of a GPU are expected")
    return {uuid: _arguments(handle, tensor) for uuid, handle in entry.items()}


def _arguments(handle: Any, tensor: TensorInfo) -> tuple[Any, ...]:
    """What the handle says, if it is what torch's reduce_tensor writes, and the tensor that was told."""
    if isinstance(handle, Called):
        handle = tuple(handle)
    if not (isinstance(handle, tuple) and len(handle) == 2 and isinstance(handle[1], tuple)):
        raise TransferFailed(f"{FIELD}: {tensor.name}: a function and its arguments are expected")
    function, arguments = handle
    if function != REBUILD:
        shown = ".".join(function) if isinstance(function, Named) else repr(function)[:80]
        raise TransferFailed(f"{FIELD}: {tensor.name}: {shown} is not called; only {'.'.join(REBUILD)} is")
    if len(arguments) != NUM_ARGUMENTS:
        raise TransferFailed(
            f"{FIELD}: {tensor.name}: {NUM_ARGUMENTS} arguments are expected, and it has {len(arguments)}"
        )
    kind, size, stride, offset, storage, dtype, *rest = arguments
    if isinstance(size, Called):  # torch.Size
        (size,) = size.arguments
    device, memory, num_bytes, begin, grad, counter, counter_at, event, waits = rest
    numbers = (offset, num_bytes, begin, counter_at, device)
    is_good = (
        kind in TENSORS
        and storage in STORAGES
        and dtype == Named("torch", tensor.dtype)
        and isinstance(size, tuple | list)
        and tuple(size) == tensor.shape
        and isinstance(stride, tuple)
        and all(type(one) is int and 0 <= one < 1 << 48 for one in (*stride, *numbers))
        and all(isinstance(one, bytes) for one in (memory, counter, event))
        and isinstance(grad, bool)
        and isinstance(waits, bool)
    )
    if not is_good:
        raise TransferFailed(
            f"{FIELD}: {tensor.name}: its handle is not that of a {tensor.dtype} of shape {list(tensor.shape)}"
        )
    return (tensor.shape, stride, offset, num_bytes, begin, memory, counter, counter_at, event, waits)


def _opened(arguments: tuple[Any, ...], tensor: TensorInfo, device: torch.device) -> Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    shape, stride, offset, num_bytes, begin, memory, counter, counter_at, event, waits = arguments
    try:
        found: Tensor = rebuild_cuda_tensor(
            torch.Tensor, shape, stride, offset, torch.UntypedStorage, getattr(torch, tensor.dtype),
            device.index, memory, num_bytes, begin, False, counter, counter_at, event, waits,
        )  # fmt: skip
    except RuntimeError as error:
        raise TransferFailed(f"{FIELD}: {tensor.name}: {str(error).splitlines()[0]}") from None
    return found
