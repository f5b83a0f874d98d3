"""Whether a model of transformers gives with our attention what it gives with transformers' own: two requests, one in two pieces beside
the other, against each computed alone, whole and without a cache.

It finds what looking at the model cannot: layers that mix tokens of a batch otherwise, positions that are not the given ones, states.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from meshlm.workers.attention.torch_backend import TorchAttention
from meshlm.workers.batch import LayerCache, RequestLens, StepInputs
from meshlm.workers.layers.ops import TorchOps
from meshlm.workers.models.transformers import interface
from meshlm.workers.models.transformers.config import in_one_line
from meshlm.workers.models.transformers.look import SHORTEST

if TYPE_CHECKING:
    from meshlm.workers.models.transformers.model import TransformersModel
BLOCK = 4
FIRST, CUT, SECOND = SHORTEST, 13, 10
"""Tokens of the first request, and of its first piece; tokens of the second, of which the last is a decode."""
ALLOWED = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Of the length of a state: the middle one of each piece, since a rounding may choose another expert for a token."""


class _Piece(NamedTuple):
    """Tokens of one request in one step. Its table counts blocks of BLOCK tokens."""

    ids: Tensor
    start: int
    table: list[int]


def why_unequal(model: "TransformersModel") -> str:
    """A reason with numbers; empty where states and logits are the same."""
    try:
        return _why_unequal(model)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:  # of transformers' code
        return f"which fails: {in_one_line(error)}"


def _why_unequal(model: "TransformersModel") -> str:
    size = model.spec.vocab_size
    device = model.rope.device
    first = torch.arange(FIRST, device=device) * 7 % size
    second = (torch.arange(SECOND, device=device) * 11 + 5) % size
    tables = list(range(FIRST // BLOCK)), list(range(FIRST // BLOCK, FIRST // BLOCK + -(-SECOND // BLOCK)))
    ops, model.ops = model.ops, TorchOps()
    try:
        with torch.inference_mode():
            caches = _caches(model, -(-SECOND // BLOCK) + FIRST // BLOCK)
            begin = _states(
                model, caches, [_Piece(first[:CUT], 0, tables[0]), _Piece(second[: SECOND - 1], 0, tables[1])]
            )
            rest = _states(
                model,
                caches,
                [_Piece(second[SECOND - 1 :], SECOND - 1, tables[1]), _Piece(first[CUT:], CUT, tables[0])],
            )
            mine = [begin[:CUT], rest[1:], begin[CUT:], rest[:1]]
            theirs = [*_alone(model, first).split((CUT, FIRST - CUT)), *_alone(model, second).split((SECOND - 1, 1))]
            for what, ours, expected in zip(
                ("a prompt", "its second piece", "a prompt beside it", "a decode"), mine, theirs, strict=True
            ):
                compared = [("states", ours, expected)]
                if model.shard.is_last:
                    compared.append(("logits", model.logits(ours), interface.logits_of(model.head_model, expected)))
                for kind, left, right in compared:
                    apart = (left.float() - right.float()).norm(dim=-1) / right.float().norm(dim=-1).clamp(min=1e-9)
                    if not float(apart.median()) <= ALLOWED[left.dtype]:
                        return f"{kind} of {what} are {float(apart.median()):.2g} of their length apart"
    finally:
        model.ops = ops
    return ""


def _caches(model: "TransformersModel", blocks: int) -> list[LayerCache]:
    spec, device = model.local, model.rope.device
    dtype = next(model.parameters()).dtype
    shape = (blocks, BLOCK, spec.num_key_value_heads, spec.head_dim)
    return [
        LayerCache(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
        for _ in range(spec.num_hidden_layers)
    ]


def _states(model: "TransformersModel", caches: list[LayerCache], pieces: list[_Piece]) -> Tensor:
    device = model.rope.device
    lens = [piece.start + len(piece.ids) for piece in pieces]
    decodes = sum(len(piece.ids) == 1 for piece in pieces)
    width = max(len(piece.table) for piece in pieces)
    positions = [torch.arange(piece.start, end) for piece, end in zip(pieces, lens, strict=True)]
    slots = [
        torch.tensor(piece.table)[at // BLOCK] * BLOCK + at % BLOCK for piece, at in zip(pieces, positions, strict=True)
    ]
    batch = StepInputs(
        input_ids=torch.cat([piece.ids for piece in pieces]),
        positions=torch.cat(positions).to(device),
        slot_mapping=(torch.cat(slots).to(device),),
        block_tables=(
            torch.tensor([piece.table + [0] * (width - len(piece.table)) for piece in pieces], device=device),
        ),
        logits_indices=None,
        num_decodes=decodes,
        lens=RequestLens(
            seq_lens=torch.tensor(lens, device=device),
            query_lens=tuple(len(piece.ids) for piece in pieces[decodes:]),
            context_lens=tuple(lens[decodes:]),
            max_decode_len=max(lens[:decodes], default=0),
        ),
    )
    return model(batch, caches, TorchAttention(batch, BLOCK), _of_stage_before(model, batch.input_ids))  # type: ignore[no-any-return]


def _of_stage_before(model: "TransformersModel", ids: Tensor) -> Tensor | None:
    """States [t, hidden] for these tokens, some or other; None: the first stage has them from its own embedding."""
    if model.shard.is_first:
        return None
    angles = (ids[:, None] + 1) * torch.arange(1, model.spec.hidden_size + 1, device=ids.device)
    return torch.sin(angles.float()).to(next(model.parameters()).dtype)


def _alone(model: "TransformersModel", ids: Tensor) -> Tensor:
    config = model.config
    config._attn_implementation = "eager"
    try:
        return model.states(ids, torch.arange(len(ids), device=ids.device), _of_stage_before(model, ids))
    finally:
        config._attn_implementation = interface.SERVING
