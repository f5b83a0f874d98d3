"""Looks at a model of transformers on the meta device: which modules attend, with which heads, masks and extras. What our attention
cannot do is refused by name.

`python -m meshlm.workers.models.transformers.look` reads a request from its standard input and writes a ModelSpec: the supervisor,
which has no torch, runs it (runtime/model_files/transformers_models.py). Workers look again before they load.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from meshlm.architectures.registry import TRANSFORMERS
from meshlm.protocol.layers import MLP, Attention, Layers, LayerSpec
from meshlm.protocol.model import ModelSpec, TransformersSpec
from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.runtime.model_files.transformers_models import Found, Request
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.models.transformers import interface
from meshlm.workers.models.transformers.config import class_of, config_of, in_one_line, quiet
from meshlm.workers.models.transformers.interface import given_states
from meshlm.workers.models.transformers.parallel import split, why_no_stages, why_not_split

_TOKENS = 9
SHORTEST = 24  # context: workers hold a model against transformers' attention with so many tokens (self_test.py)
_HARMLESS = frozenset(("position_ids", "position_embeddings", "cache_position", "input_ids", "attention_mask_2d"))
"""Tensors that models hand on to attention without a meaning there."""


class Layout(NamedTuple):
    spec: ModelSpec
    modules: tuple[str, ...]  # the names of the modules that attend, in the order of layers
    weight_bytes: int  # in bfloat16


def look(source: TransformersSpec, folder: Path) -> Layout:
    """ModelFilesError says what of the model cannot be served."""
    quiet()
    interface.register()
    config = config_of(source, folder)
    made = class_of(config, source, folder)
    if getattr(made, "_is_stateful", False):
        raise ModelFilesError("it keeps recurrent states, for which transformers' code has a cache of its own")
    try:
        with torch.device("meta"):
            model = made._from_config(config, attn_implementation=interface.LOOKING, dtype=torch.bfloat16).eval()
        seen = _calls(model)
    except ModelFilesError:
        raise
    except Exception as error:  # transformers' code for this model may raise anything
        raise ModelFilesError(
            f"it does not attend through transformers' attention interface ({in_one_line(error)})"
        ) from None
    names = {id(module): name for name, module in model.named_modules()}
    found, hidden, vocabulary = seen
    _check_layers(found, config)
    heads, kv_heads, head_dim = _heads(found)
    windows = [_window(call, _context(config)) for call in found]
    if len(set(windows) - {0}) > 1:
        raise ModelFilesError(f"its layers have windows of several sizes ({sorted(set(windows) - {0})})")
    caps = {call.softcap or 0.0 for call in found}
    if len(caps) > 1:
        raise ModelFilesError(f"its layers have several soft caps ({sorted(caps)})")
    wide = getattr(config, "intermediate_size", None)
    spec = ModelSpec(
        architecture=TRANSFORMERS,
        vocab_size=vocabulary,
        hidden_size=hidden,
        layers=Layers.from_records(
            LayerSpec(
                attention=Attention(num_key_value_heads=kv_heads, head_dim=head_dim, sliding_window=window),
                mlp=MLP(intermediate_size=wide if isinstance(wide, int) and wide > 0 else 4 * hidden),
            )
            for window in windows
        ),
        num_attention_heads=heads,
        max_position_embeddings=_context(config),
        attn_logit_softcapping=caps.pop(),
        dtype=_dtype(source),
        transformers=source,
    )
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    modules = tuple(names[id(call.module)] for call in found)
    not_staged = why_no_stages(model, modules)
    not_split = why_not_split(model) or _why_not_by_heads(model, heads, kv_heads)
    split_as = msgspec.structs.replace(source, not_split=not_split, not_staged=not_staged)
    return Layout(msgspec.structs.replace(spec, transformers=split_as), modules, weight_bytes)


def _calls(model: Any) -> tuple[list[interface.Seen], int, int]:
    """The calls of attention in one pass, the size of the hidden states behind the last norm, and that of the vocabulary."""
    seen: list[interface.Seen] = []
    for module in model.modules():
        setattr(module, interface.LAYER, seen)
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    with torch.no_grad():
        hidden = model.base_model(
            input_ids=ids, position_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False
        ).last_hidden_state
        with given_states(model) as logits_of:
            logits = logits_of(hidden[0])
    if hidden.shape[:2] != (1, _TOKENS) or logits.shape[0] != _TOKENS:
        raise ModelFilesError(f"its states have the shape {tuple(hidden.shape)}, its logits {tuple(logits.shape)}")
    return seen, hidden.shape[2], logits.shape[1]


def _why_not_by_heads(model: Any, heads: int, kv_heads: int) -> str:
    """Splits the model, which is lost by that, and looks again: a plan may leave attention whole."""
    size = next((size for size in range(2, kv_heads + 1) if kv_heads % size == 0), 0)
    if not size:
        return "it has one key-value head"
    try:
        split(model, Shard(0, size), lambda x: x)
        found, _, _ = _calls(model)
    except ModelFilesError:
        raise
    except ProcessFatal:
        return ""  # another number of ranks may divide its sizes
    except (RuntimeError, ValueError) as error:
        return f"base_model_tp_plan does not split it ({in_one_line(error)})"
    here = {(call.query[1], call.key[1], call.value[1]) for call in found}
    if here != {(heads // size, kv_heads // size, kv_heads // size)}:
        return "base_model_tp_plan leaves attention whole"
    sinks = [call.others[interface.SINKS] for call in found if interface.SINKS in call.others]
    return "base_model_tp_plan leaves attention's sinks whole" if any(len(each) == heads for each in sinks) else ""


def _check_layers(found: list[interface.Seen], config: Any) -> None:
    """Refuses layers that compute what is between tokens otherwise than by one call of attention."""
    layers = config.num_hidden_layers
    if len({id(call.module) for call in found}) != len(found):
        raise ModelFilesError("a layer of it attends several times in a step")
    if len(found) != layers:
        raise ModelFilesError(f"{len(found)} of its {layers} layers attend through transformers' attention interface")
    for layer, call in enumerate(found):
        where = f"layer {layer}"
        for name, value in call.others.items():
            if name == interface.SINKS and tuple(value.shape) == call.query[1:2]:
                continue
            if isinstance(value, Tensor) and name not in _HARMLESS:
                raise ModelFilesError(f"{where}: its attention is given {name}, which ours does not know")
        if call.others.get("dropout"):
            raise ModelFilesError(f"{where}: its attention has dropout {call.others['dropout']}")
        if call.others.get("is_causal") is False:
            raise ModelFilesError(f"{where}: its attention is not causal")


def _heads(found: list[interface.Seen]) -> tuple[int, int, int]:
    """Query heads, key-value heads and their size, of all layers alike."""
    shapes = {(call.query[1], call.key[1], call.query[3], call.key[3], call.value[1], call.value[3]) for call in found}
    if len(shapes) > 1:
        raise ModelFilesError(f"its layers have heads of several shapes ({sorted(shapes)})")
    heads, kv_heads, size, key_size, value_heads, value_size = shapes.pop()
    if size != key_size or kv_heads != value_heads or value_size > size or heads % kv_heads:
        raise ModelFilesError(
            f"{heads} query heads of {size} with {kv_heads} key heads of {key_size} and {value_heads} value heads of {value_size}"
        )
    if any(call.key[2] != _TOKENS for call in found):
        raise ModelFilesError("its attention sees other keys than those of its own tokens")
    return heads, kv_heads, size


def _window(call: interface.Seen, context: int) -> int:
    """The tokens that a query sees, itself among them; 0: all before it. Found by asking what makes the mask."""
    if not isinstance(call.mask, interface.MaskFunction):
        raise ModelFilesError("it makes its attention masks itself, or has none")
    zero, found = torch.tensor(0), set[int]()
    for query in sorted({0, 1, min(1000, context - 1), context // 2, context - 1}):
        keys = torch.arange(min(query + 8, context))
        row = torch.broadcast_to(call.mask.sees(zero, zero, torch.tensor(query), keys), keys.shape).bool()
        count = int(row.sum())
        if not bool(row[query + 1 - count : query + 1].all()) or count == 0:
            raise ModelFilesError("its attention mask is neither causal nor a sliding window")
        found.add(0 if count == query + 1 else count)
    if len(found - {0}) > 1:
        raise ModelFilesError("its attention mask is neither causal nor a sliding window")
    return max(found)


def _context(config: Any) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < SHORTEST:
        raise ModelFilesError(
            f"max_position_embeddings {length!r}: its context must be known, and {SHORTEST} tokens at least"
        )
    return length


def _dtype(source: TransformersSpec) -> str:
    values = msgspec.json.decode(source.config)
    return str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")


def attending(model: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    modules = dict(model.named_modules())
    return [modules[name] for name in names]


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    try:
        answer = Found(spec=look(request.source, Path(request.folder)).spec)
    except ModelFilesError as error:
        answer = Found(error=str(error))
    sys.stdout.write("\n" + msgspec.json.encode(answer).decode() + "\n")


if __name__ == "__main__":
    main()
