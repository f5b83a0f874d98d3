"""Shards of a model, each in a thread of its own, with a communicator between the threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from small_models import BLOCK, CPU, batch_of, caches, resolved
from torch import Tensor

from meshlm.workers.attention.backend import choose
from meshlm.workers.batch import VECTOR
from meshlm.workers.distributed.communicator import Communicator, side_by_side
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.layers.ops import TorchOps
from meshlm.workers.layers.summing_ops import SummingOps
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights.load import load_model

LIMIT_S = 30


class Threads(Communicator):
    """A communicator between threads: what they put down, when all have done so, is there for all."""

    def __init__(self, shard: Shard, tables: dict[int, list[Any]], barriers: list[threading.Barrier]) -> None:
        self._shard, self._table, self._barrier = shard, tables[shard.pp_rank], barriers[shard.pp_rank]

    links: dict[int, "Queue[Tensor]"]
    one_row = None

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._table[self._shard.tp_rank] = x.clone()
        self._barrier.wait(LIMIT_S)
        parts = list(self._table)
        self._barrier.wait(LIMIT_S)
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def allreduce_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        return None

    def gather(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        return side_by_side(self._exchange(x), width, out)

    def send(self, x: Tensor) -> None:
        self.links[self._shard.rank].put(x.clone())

    def receive(self, into: Tensor) -> None:
        into.copy_(self.links[self._shard.rank - self._shard.tp_size].get(timeout=LIMIT_S))


def shards(tp: int, pp: int, *, expert_parallel: bool = False) -> list[Shard]:
    ranks = [(rank, stage) for stage in range(pp) for rank in range(tp)]
    if expert_parallel:
        return [Shard(rank, tp, stage, pp, rank, tp) for rank, stage in ranks]
    return [Shard(rank, tp, stage, pp) for rank, stage in ranks]


def communicators(ranks: list[Shard]) -> list[Threads]:
    """One for each rank of a group; each belongs to a thread of its own."""
    tp, pp = ranks[0].tp_size, ranks[0].pp_size
    tables: dict[int, list[Any]] = {stage: [None] * tp for stage in range(pp)}
    barriers = [threading.Barrier(tp) for _ in range(pp)]
    links: dict[int, Queue[Tensor]] = {shard.rank: Queue() for shard in ranks}
    found = [Threads(shard, tables, barriers) for shard in ranks]
    for comm in found:
        comm.links = links
    return found


def together(models: list[Decoder], work: Callable[[Decoder, Threads], Tensor]) -> list[Tensor]:
    """Every shard's `work` at the same time, with a communicator."""

    def one(model: Decoder, comm: Threads) -> Tensor:
        model.join(comm)
        return work(model, comm)

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(one, models, communicators([model.shard for model in models])))


def logits_of(model: Decoder, comm: Threads, tokens: list[int], given: dict[int, Tensor] | None = None) -> Tensor:
    """A whole prompt through this shard; logits on the last stage. given: vectors that came with it, by the first of their places."""
    table = [7, 3, 11, 0, 5, 9, 1, 2, 8, 4]
    batch = batch_of([(tokens, 0, table)])
    if given is not None:
        batch = replace(batch, vectors=torch.zeros(len(tokens), model.spec.hidden_size))
        for begin, vectors in given.items():
            batch.input_ids[begin : begin + len(vectors)] = VECTOR
            batch.vectors[begin : begin + len(vectors)] = vectors  # type: ignore[index]
    with torch.inference_mode():
        ops = model.ops.base if isinstance(model.ops, SummingOps) else model.ops
        backend = choose("torch" if isinstance(ops, TorchOps) else "cpu", model.local, CPU, torch.float32, BLOCK)
        stream = None
        if not model.shard.is_first:
            stream = torch.empty(len(tokens), model.spec.hidden_size)
            comm.receive(stream)
        hidden: Tensor = model(batch, caches(model.local, 24), backend.step(batch, BLOCK), stream)
        if not model.shard.is_last:
            comm.send(hidden)
            return hidden
        return model.logits(hidden)


def load_shards(path: Path, tp: int, pp: int, load_format: str = "auto") -> list[Decoder]:
    found = resolved(path, load_format)
    with torch.inference_mode():
        return [load_model(found, CPU, 0, lambda done, total: None, shard) for shard in shards(tp, pp)]
