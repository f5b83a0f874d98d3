"""What a start runs has every variant of a kernel that a step or a graph launches (nothing is launched here, no GPU)."""

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from tiny_models import spec_of
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from meshlm.kernels.attention import tiles
from meshlm.kernels.attention.tiles import SHORT_CONTEXT
from meshlm.kernels.gate_up_silu import kernel as gate_up_silu
from meshlm.kernels.gate_up_silu.kernel import Shape as Tile
from meshlm.kernels.small_m_gemm import kernel as small_m_gemm
from meshlm.kernels.small_m_gemm.kernel import Shape
from meshlm.workers.attention import triton_backend
from meshlm.workers.attention.triton_backend import TritonBackend
from meshlm.workers.batch import LayerCache
from meshlm.workers.distributed.shard import WHOLE
from meshlm.workers.engine import triton_kit
from meshlm.workers.engine.compute import Compute
from meshlm.workers.engine.graph_steps import PaddedStep
from meshlm.workers.engine.triton_inputs import TritonInputs
from meshlm.workers.graphs.keys import (
    LONG,
    LONG_CONTEXT,
    SHORT,
    Key,
    graph_keys,
    graphs_to_warm_up,
    long_requests,
    long_to_warm_up,
    shared_to_warm_up,
    steps_to_warm_up,
)
from meshlm.workers.layers.triton_ops import TritonOps
from meshlm.workers.models import decoder
from meshlm.workers.output import logprobs
from meshlm.workers.output.logits_sampler import LogitsSampler
from meshlm.workers.rows.changes import I32
from meshlm.workers.rows.device_rows import DeviceRows
from meshlm.workers.rows.shared_prefixes import Clusters, PrefixTables
from meshlm.workers.rows.step_columns import columns_of

if torch.cuda.is_available():
    pytest.skip("these tensors are on the CPU, where nothing is compiled", allow_module_level=True)

CPU = torch.device("cpu")
LENGTH, BLOCK, TOKENS = 512, 16, 1024
FEW = [Shape(16, 32, 16, 1, 4, 3), Shape(16, 32, 16, 1, 2, 3), Shape(32, 32, 16, 1, 4, 3), Shape(64, 32, 16, 1, 4, 3)]
SMALL_M_GEMM = list(zip([1, 8, 16, 192], [8, 16, 192, 256], FEW, strict=True))  # rows above, up to
MANY = [Tile(16, 16, 16, 4, 3), Tile(16, 16, 16, 4, 3, True), Tile(32, 16, 16, 4, 3)]
MANY_ROWS = list(zip([256, 300, 700], [300, 700, 9999], MANY, strict=True))
Variant = tuple[str, tuple[tuple[str, object], ...]]


def staging() -> Any:
    def send(values: I32, to: Tensor) -> None:
        to[: len(values)] = torch.from_numpy(values)

    return SimpleNamespace(send=send)


def of_argument(value: object, *, varies: bool, unaligned: bool) -> object:
    """What Triton compiles another variant for."""
    if isinstance(value, Tensor):
        return value.dtype, not unaligned and not varies and value.data_ptr() % 16 == 0
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape)
    if isinstance(value, int):
        return "int", not varies and (value == 1, value % 16 == 0)
    return type(value)


def variant(function: Any, arguments: tuple[object, ...], options: dict[str, object]) -> Variant:
    signature = inspect.signature(function.fn)
    named = {name: value for name, value in options.items() if name in signature.parameters}
    found: dict[str, object] = {name: value for name, value in options.items() if name not in named}
    varying, unaligned = (
        function.kwargs[name] or () for name in ("do_not_specialize", "do_not_specialize_on_alignment")
    )
    for name, value in signature.bind(*arguments, **named).arguments.items():
        constant = "constexpr" in str(signature.parameters[name].annotation)
        found[name] = value if constant else of_argument(value, varies=name in varying, unaligned=name in unaligned)
    return function.__name__, tuple(sorted(found.items()))


class Case:
    """The engine's steps, with the launches of kernels written down instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_rows: int, heads: tuple[int, int]) -> None:
        self.launched: set[Variant] = set()

        def launch(function: Any, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
            self.launched.add(variant(function, arguments, options))

        monkeypatch.setattr(interpreter.InterpretedFunction, "run", launch)
        h200 = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
        monkeypatch.setattr(decoder, "make_ops", lambda device, dtype: TritonOps())
        spec = spec_of(
            architecture="Qwen3ForCausalLM",
            vocab_size=53,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=heads[0],
            num_key_value_heads=heads[1],
            head_dim=16,
            max_position_embeddings=LENGTH,
            rms_norm_eps=1e-6,
            qk_norm=True,
        )
        self.spec = spec
        model = decoder.Decoder(spec, LENGTH).to(torch.bfloat16)
        model.prepare(CPU, torch.bfloat16)
        self.rows = DeviceRows(max_rows, LENGTH, BLOCK, CPU)
        self.inbox = TritonInputs(self.rows, staging(), CPU)
        self.model, self.head = model, LogitsSampler(model, self.rows, torch.bfloat16, CPU)
        self.compute = Compute(model, TritonBackend(), BLOCK, WHOLE, self.inbox, self.head, torch.empty(0))
        self.of_graph = PaddedStep(self.compute, WHOLE, self.inbox, self.head)
        self.compute.caches = [
            LayerCache(*torch.zeros(2, 1, BLOCK, heads[1], 16, dtype=torch.bfloat16)) for _ in range(2)
        ]
        self.keys = graph_keys("FULL", max_rows, TOKENS, (), 10**6)
        width = (heads[0] + 2 * heads[1]) * 16
        sizes = [(64, heads[0] * 16, "parts"), (64, 96, "parts"), (192, 64, "gate"), (width, 64, "product")]
        split = [(over, to, shape._replace(splits=1 + (over == 192))) for over, to, shape in SMALL_M_GEMM]
        table = {size: split if size[2] == "parts" else SMALL_M_GEMM for size in sizes}
        monkeypatch.setattr(small_m_gemm, "_table", lambda: table)
        monkeypatch.setattr(gate_up_silu, "_table", lambda: {(192, 64): MANY_ROWS})
        self.decodes = tiles.warm_sizes(heads[1], max_rows, LENGTH, CPU)

    @torch.inference_mode()
    def eager(self, counts: list[int], shared: Clusters | None = None) -> None:
        n = len(counts)
        step = columns_of(np.zeros(n, np.int32), np.zeros(n, np.int32), np.array(counts, np.int32))
        step.shared = shared
        self.inbox.send(step, n, np.empty(0, np.int32), 0, np.arange(n))
        self.compute.eager(step)

    @torch.inference_mode()
    def padded(self, key: Key) -> None:
        self.inbox.clear()
        self.of_graph(key)


@pytest.fixture(autouse=True)
def no_shapes_of_other_tables() -> Iterator[None]:
    for cached in (small_m_gemm.shape_for, gate_up_silu.shape_for):
        cached.cache_clear()
    yield
    for cached in (small_m_gemm.shape_for, gate_up_silu.shape_for):
        cached.cache_clear()


@pytest.mark.parametrize(("max_rows", "heads"), [(16, (8, 2)), (1, (4, 4)), (48, (8, 8)), (73, (4, 1))])
def test_a_start_leaves_no_kernel_to_be_compiled(
    monkeypatch: pytest.MonkeyPatch, max_rows: int, heads: tuple[int, int]
) -> None:
    """With 16 rows and 2 kv heads, only the 17 requests of a mixed graph have contexts in 16 parts beside prompts."""
    case = Case(monkeypatch, max_rows, heads)
    rows = small_m_gemm.warm_rows() | gate_up_silu.warm_rows()
    for counts in steps_to_warm_up(case.decodes, rows, max_rows, LENGTH, TOKENS):
        case.eager(counts)
    for key in graphs_to_warm_up(case.keys, rows, min(TOKENS, max_rows * LENGTH)):
        case.padded(key)
    few = long_requests(max_rows)
    for key in long_to_warm_up(case.keys, few):
        case.padded(key)
    case.head.one_line()
    known, case.launched = case.launched, set()
    assert len(known) > 15
    for length in (1, 2, 7, 16, 40, 100, 128, 200, LENGTH):
        case.eager([length])
    for length in (257, 400, 750, TOKENS):
        if max_rows > 1 or length <= LENGTH:
            case.eager([min(length, LENGTH), length - LENGTH] if length > LENGTH else [length])
    for count in range(1, max_rows + 1):
        case.eager([1] * count)
        case.eager([1] * (count - 1) + [19])
        case.eager([5] * min(2, max_rows) + [1] * (count - 2))
    for key in case.keys:
        case.padded(key)
        for requests in () if key.uniform else few:
            case.padded(Key(key.tokens, requests, contexts=LONG))
    for count in range(1, max_rows + 1):  # lines whose log-probabilities are asked for
        logprobs.in_chunks(case.head.hidden[:count], case.head.sampled[:count].long(), 2, case.model.logits)
    assert case.launched - known == set()
    assert {name for name, _ in known} >= {"_small_m_gemm", "_rms_norm", "_gate_up_silu"}


@pytest.mark.parametrize(("max_rows", "heads"), [(16, (8, 2)), (1, (4, 4)), (48, (8, 8)), (73, (4, 1)), (160, (16, 2))])
def test_nor_one_of_steps_that_share_prefixes(
    monkeypatch: pytest.MonkeyPatch, max_rows: int, heads: tuple[int, int]
) -> None:
    case = Case(monkeypatch, max_rows, heads)
    sizes = tiles.shared_sizes(*heads, 132)
    assert sizes is not None
    case.rows.prefixes = PrefixTables(0, BLOCK, max_rows, sizes, 1)
    rows = small_m_gemm.warm_rows() | gate_up_silu.warm_rows()
    for counts in steps_to_warm_up(case.decodes, rows, max_rows, LENGTH, TOKENS):
        case.eager(counts)
    for key in graphs_to_warm_up(case.keys, rows, min(TOKENS, max_rows * LENGTH)):
        case.padded(key)
    for key in shared_to_warm_up(case.keys, tiles.warm_shared(sizes, [(*heads, 16)], max_rows, LENGTH, CPU), max_rows):
        case.padded(key)
    known, case.launched = case.launched, set()
    assert "_shared_prefix" in {name for name, _ in known}
    for key in case.keys:
        case.padded(key._replace(shared=True))
    for count in range(2, max_rows + 1):
        shared = Clusters(np.arange(2, dtype=np.int32), np.array([2]), np.array([128]))
        case.eager([1] * count, shared)
        if count > 2:
            case.eager([1] * (count - 1) + [19], shared)
    attention = {
        found for found in case.launched if found[0] in ("_shared_prefix", "_decode", "_prefill", "_rope_cache")
    }
    assert attention - known == set()


@pytest.mark.parametrize(("max_rows", "longest", "tokens"), [(4, 10, 64), (2, 64, 64), (64, 512, 512)])
def test_prompts_of_as_many_rows_as_there_are_kinds(max_rows: int, longest: int, tokens: int) -> None:
    """As far as steps have so many tokens; what is beyond that, by the most that they have."""
    found = list(steps_to_warm_up([], {8, 48, 256}, max_rows, longest, tokens))
    most = min(tokens, max_rows * longest)
    assert {sum(counts) for counts in found} == {min(rows, most) for rows in (3, 8, 48, 256, longest)}
    assert all(len(counts) <= max_rows and max(counts) <= longest for counts in found)


def test_attention_in_graphs_for_long_contexts_is_launched_for_those(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts by the keys that they will see, of decodes in as many parts as so few requests have."""
    case, pairs, parts = Case(monkeypatch, 48, (8, 2)), list[int | None](), list[int]()
    monkeypatch.setattr(triton_backend, "prefill", lambda *_, num_pairs, **__: pairs.append(num_pairs))
    monkeypatch.setattr(triton_backend, "decode", lambda *found, **_: parts.append(found[7]))
    for key in (Key(256, 5, contexts=LONG), Key(256, 49)):
        case.padded(key)
    assert pairs == [256 * LONG_CONTEXT] * 2 + [None] * 2, "two layers"
    few, many = parts[0], parts[-1]
    assert few > many


def test_attention_in_graphs_for_short_contexts_is_launched_for_those(monkeypatch: pytest.MonkeyPatch) -> None:
    case, longest = Case(monkeypatch, 48, (8, 2)), list[int]()

    def some(programs: int, most: int, *_: object) -> tiles.Tile:
        longest.append(most)
        return 1, 32, 2, 2

    monkeypatch.setattr(triton_backend, "decode_tiles", some)
    for key in (Key(2, 2, contexts=SHORT), Key(2, 2)):
        case.padded(key)
    assert longest == [SHORT_CONTEXT] * 2 + [LENGTH] * 2, "two layers"


@pytest.mark.parametrize("drafting", [False, True])
def test_drafts_are_verified_with_every_tile(monkeypatch: pytest.MonkeyPatch, drafting: bool) -> None:
    def some(programs: int, *_: object) -> tiles.Tile:
        return 1 if programs > 24 else 4, 32, 2, 2

    case = Case(monkeypatch, 48, (8, 2))
    monkeypatch.setattr(tiles, "decode_tiles", some)
    rows = SimpleNamespace(block_tables=torch.zeros(1, 1, 8), block_size=BLOCK, max_lines=100)
    engine: Any = SimpleNamespace(spec=case.spec, rows=rows, device=CPU)
    inputs: Any = SimpleNamespace(verified=object() if drafting else None, queries=5)
    tokens = [key.tokens for key in triton_kit._steps_with_drafts(engine, inputs)]
    kv_heads = case.spec.num_key_value_heads
    assert tokens == ([1, 2, 4, 8, 16, 32, 64, 100] if drafting else [])
    splits = {tiles.verify_tile(number, 5, kv_heads, 8 * BLOCK, CPU, 1, case.spec.head_dim).splits for number in tokens}
    assert splits == ({1, 4} if drafting else set()), "one kind for few requests, one for many"


@pytest.mark.parametrize(("context", "sizes"), [(SHORT_CONTEXT, []), (2 * SHORT_CONTEXT, [1, 2])])
def test_which_decodes_have_other_tiles_where_contexts_are_short(
    monkeypatch: pytest.MonkeyPatch, context: int, sizes: list[int]
) -> None:
    def some(programs: int, longest: int, *_: object) -> tiles.Tile:
        return 1, 16 if programs <= 4 and longest <= SHORT_CONTEXT else 32, 2, 2

    case = Case(monkeypatch, 48, (8, 2))
    monkeypatch.setattr(tiles, "decode_tiles", some)
    rows = SimpleNamespace(block_tables=torch.zeros(1, 1, context // BLOCK), block_size=BLOCK)
    engine: Any = SimpleNamespace(spec=case.spec, rows=rows, device=CPU)
    found = triton_kit._short_decodes(engine, case.keys)
    assert found == [Key(size, size, contexts=SHORT) for size in sizes]


def test_graphs_of_each_kind() -> None:
    """Decodes, mixed ones by their requests, and the widest of each kind of products that no step by hand has."""
    decodes, mixed = [Key(1, 1), Key(2, 2)], [Key(tokens, 3) for tokens in (128, 256, 512, 1024)]
    assert graphs_to_warm_up([*decodes, *mixed], set(), 200) == [decodes[0], mixed[0]]
    assert graphs_to_warm_up([*decodes, *mixed], {100, 300, 700}, 200) == [decodes[0], mixed[0], mixed[1], mixed[2]]
    assert graphs_to_warm_up([*decodes, *mixed], {9999}, 1024) == [decodes[0], mixed[0]]
    short = Key(1, 1, contexts=SHORT)
    assert graphs_to_warm_up([*decodes, short, *mixed], set(), 200) == [decodes[0], short, mixed[0]]
    long = [Key(tokens, requests, contexts=LONG) for requests in (5, 9) for tokens in (128, 1024)]
    assert long_to_warm_up([*decodes, *mixed], (5, 9)) == long
    assert long_to_warm_up(decodes, (5, 9)) == [], "no mixed step has a graph"
