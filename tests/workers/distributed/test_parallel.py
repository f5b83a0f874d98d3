"""Shards of a model, each in a thread of its own, give what the whole model gives."""

import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf_models import write_gguf
from sharded_models import LIMIT_S, load_shards, logits_of, shards, together
from small_models import CLASSIC, CPU, DEEPSEEK, DENSE, GEMMA, GEMMA3N, GEMMA4, MOE, SMALL, caches, load, run
from tiny_models import spec_of
from waiting import free_port

from meshlm.protocol.config import MeshConfig, Node, ParallelConfig, RunConfig
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.distributed import communicator as connecting
from meshlm.workers.distributed import membership
from meshlm.workers.distributed import placement as placing
from meshlm.workers.distributed.communicator import Distributed, _interface_names
from meshlm.workers.distributed.membership import Meeting, Membership, meet
from meshlm.workers.distributed.placement import WorkerPlacement
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.layers import cpu_ops
from meshlm.workers.weights.load import weight_bytes
from meshlm.workers.weights.slices import place
from meshlm.workers.weights.sources import shapes

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "phi3": ("Phi3Config", {}),
    **DENSE,
    **MOE,
    **{name: DEEPSEEK[name] for name in ("deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2")},
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma3": ("Gemma3TextConfig", GEMMA | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
}
CASES |= {"gemma3n": ("Gemma3nTextConfig", GEMMA3N), **GEMMA4}
OWN_LAYOUTS = {"gemma3n": [(2, 1)], "gemma4-e2b": [(2, 1)], "gemma4-dense": [(4, 2)], "gemma4-moe": [(2, 2)]}
"""Layers that share keys and values are in one stage; four ranks have one key-value head of the layers that see all."""
LAYOUTS = [(2, 1), (1, 3), (6, 1), (2, 3)]  # six ranks share two key-value heads


ALIKE = {
    "granite",
    "granite-tied",
    "glm4-moe-bias",
    "dots1",
    "seed-oss",
    "ministral",
    "ernie4.5",
    "gpt-neox-serial",
    "opt",
}
ALIKE |= {"solar-open", "cwm", "granite-moe-shared", "stablelm-parallel", "gptj", "nemotron", "falcon-11b", "falcon-rw"}
"""Ranks split these as they split another case."""


EVERY_LAYOUT = ("llama-tied", "qwen2", "phi3", "olmo2", "mixtral", "qwen2-moe", "gpt-oss", "deepseek-v2-lite", "gemma3")
"""Cases that have, between them, each kind of part that ranks split."""


@pytest.mark.parametrize("case", [*CASES, *(case for case in CLASSIC if case not in ALIKE)])
def test_shards_give_the_logits_of_the_whole(case: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    name, extra = (CASES | CLASSIC)[case]
    config = getattr(transformers, name)(**{**SMALL, "intermediate_size": 96, **extra})
    theirs = transformers.AutoModelForCausalLM.from_config(config).float()
    for parameter_name, parameter in theirs.named_parameters():
        if parameter_name.endswith("bias"):  # which one rank adds
            parameter.data += torch.randn_like(parameter) * 0.3
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(0, 211, (37,)).tolist()
    whole_model = load(tmp_path)
    whole = run(whole_model, caches(whole_model.spec, 24), [(tokens, 0, [7, 3, 11, 0, 5, 9, 1, 2, 8, 4])])
    for tp, pp in LAYOUTS if case in EVERY_LAYOUT else OWN_LAYOUTS.get(case, [(2, 3)]):
        found = together(load_shards(tmp_path, tp, pp), lambda model, comm: logits_of(model, comm, tokens))
        for logits in found[-tp:]:
            torch.testing.assert_close(logits, whole, atol=2e-5, rtol=1e-4)
            assert torch.equal(logits, found[-1]), "the ranks would sample different tokens"


def test_shards_with_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "architectures": ["LlamaForCausalLM"]}))
    monkeypatch.setattr(cpu_ops, "available", lambda: False)
    tokens = list(range(20))
    (whole,) = together(load_shards(tmp_path, 1, 1, "dummy"), lambda model, comm: logits_of(model, comm, tokens))
    found = together(load_shards(tmp_path, 2, 1, "dummy"), lambda model, comm: logits_of(model, comm, tokens))
    torch.testing.assert_close(found[0], whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "CohereForCausalLM"])
def test_vectors_that_came_with_a_prompt_are_those_of_their_tokens(architecture: str, tmp_path: Path) -> None:
    """Some in the middle and the last one, whose ids are others: on one rank, on two, in two stages, and for a prompt of one."""
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "architectures": [architecture]}))
    (whole_model,) = load_shards(tmp_path, 1, 1, "dummy")
    tokens = list(range(20, 40))
    table = whole_model.embedding(torch.tensor(tokens)).clone()
    given = {5: table[5:9], 19: table[19:]}
    others = [*tokens[:5], 1, 2, 3, 4, *tokens[9:19], 0]
    (whole,) = together([whole_model], lambda model, comm: logits_of(model, comm, tokens))
    for tp, pp in ((1, 1), (2, 1), (1, 3)):
        shards = load_shards(tmp_path, tp, pp, "dummy")
        found = together(shards, lambda model, comm: logits_of(model, comm, others, given))
        torch.testing.assert_close(found[-1], whole, atol=2e-5, rtol=1e-4)
    (one,) = together([whole_model], lambda model, comm: logits_of(model, comm, tokens[:1]))
    alone = {0: table[:1]}
    found = together(load_shards(tmp_path, 2, 1, "dummy"), lambda model, comm: logits_of(model, comm, [7], alone))
    torch.testing.assert_close(found[-1], one, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kinds", [{"embed": "Q8_0", "": "Q4_1"}, {"down": "Q6_K", "embed": "Q6_K", "": "Q4_K"}])
def test_shards_whose_weights_stay_encoded(kinds: dict[str, str], tmp_path: Path) -> None:
    """Rows and columns of the file's blocks. Two ranks' halves of 256 columns of o are no blocks of Q4_K: those are decoded."""
    path = tmp_path / "m.gguf"
    write_gguf(path, kinds)
    tokens = list(range(31))
    (whole,) = together(load_shards(path, 1, 1), lambda model, comm: logits_of(model, comm, tokens))
    for tp, pp in [(2, 1), (1, 2), (4, 1), (2, 2)]:
        models = load_shards(path, tp, pp)
        assert max(map(weight_bytes, models)) < 1.5 * weight_bytes(load_shards(path, 1, 1)[0]) / pp
        found = together(models, lambda model, comm: logits_of(model, comm, tokens))
        for logits in found[-tp:]:
            torch.testing.assert_close(logits, whole, atol=2e-5, rtol=1e-4)


SPEC = spec_of(
    vocab_size=211,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=128,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm=True,
)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (3, 2), (6, 3)])
def test_every_part_of_every_tensor_has_a_place(tp: int, pp: int) -> None:
    """Ranks together keep each element; only replicated ones more than once. Nobody keeps the whole of what is split."""
    replicated = ("norm.weight", "k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
    for name, shape in shapes(SPEC):
        kept: list[int] = []
        for shard in shards(tp, pp):
            found = place(name, SPEC, shard)
            if found is not None:
                assert found.shape == shape
                kept += range(found.begin, found.end)
        length = shape[1] if ".o_proj.w" in name or ".down_proj.w" in name else shape[0]
        assert set(kept) == set(range(length)), name
        if not name.endswith(replicated):
            assert len(kept) == length, name


def test_a_tensor_of_a_layer_that_the_model_has_not() -> None:
    """check.py names it."""
    assert place("model.layers.6.mlp.up_proj.weight", SPEC, Shard()) is None
    assert place("model.layers.5.rotary_emb.inv_freq", SPEC, Shard()) is None


def test_numbering_is_stage_by_stage() -> None:
    parallel = ParallelConfig(data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=3)
    found = [Shard.of_worker(parallel, worker) for worker in range(12)]
    assert [shard.rank for shard in found] == [*range(6), *range(6)]
    assert found[9] == Shard(tp_rank=1, tp_size=2, pp_rank=1, pp_size=3)
    assert [worker for worker, shard in enumerate(found) if shard.reports] == [4, 10]


def test_gguf_parts_are_cut_before_decoding_where_blocks_allow(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    from meshlm.workers.weights.sources import sources

    path = tmp_path / "m.gguf"
    values = np.random.default_rng(0).normal(size=(48, 128)).astype(np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    for name in ("blk.0.attn_q.weight", "blk.0.ffn_down.weight"):
        quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = dict(sources(path, "gguf", SPEC, CPU, 0))
    query, down = (found[f"model.layers.0.{name}.weight"] for name in ("self_attn.q_proj", "mlp.down_proj"))
    whole_query, whole_down = query.part(0, 0, 48), down.part(0, 0, 48)
    assert torch.equal(query.part(0, 16, 32), whole_query[16:32])
    assert torch.equal(down.part(1, 32, 96), whole_down[:, 32:96])  # at borders of blocks of 32
    assert torch.equal(down.part(1, 10, 75), whole_down[:, 10:75])


# --- how the ranks of a group meet ---


@pytest.mark.parametrize("where", ["file", "address"])
def test_ranks_meet_once_all_of_the_same_lives_are_there(where: str, tmp_path: Path) -> None:
    ranks = [Membership() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        address = ("127.0.0.1", free_port()) if where == "address" else None
        places = [Meeting(rank, str(tmp_path), address) for rank in range(3)]
        meeting = [pool.submit(meet, member, place) for member, place in zip(ranks, places, strict=True)]
        ranks[0].offer((1, 2, 3))
        ranks[1].offer((1, 2, 3))
        assert ranks[0].withdraw(), "the third died before it came, and nobody is committed"
        for member in ranks:
            assert member.offer((1, 2, 4))
        for future in meeting:
            future.result(LIMIT_S)
    assert [member.committed for member in ranks] == [(1, 2, 4)] * 3
    assert ranks[0].offer((1, 2, 4))
    assert not ranks[0].offer((1, 5, 4)), "committed to other incarnations"
    assert not ranks[1].withdraw()


def test_the_store_listens_at_its_address_alone(tmp_path: Path) -> None:
    port = free_port()
    store = Meeting(0, str(tmp_path), ("127.0.0.2", port)).open((1, 2))
    assert store is not None
    socket.create_connection(("127.0.0.2", port), LIMIT_S).close()
    for other in ("127.0.0.1", "127.0.0.3"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), LIMIT_S)


def test_a_store_whose_port_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        port: int = taken.getsockname()[1]
        with pytest.raises(ProcessFatal, match=f"--master-port: port {port}: Address already in use"):
            Meeting(0, str(tmp_path), ("127.0.0.2", port)).open((1, 2))


def test_a_worker_that_is_stuck_in_a_store_takes_no_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of rank 0 is gone without a word, and TCP waits for it: only a new process gets out."""
    member = Membership()
    assert member.offer((1, 2))
    assert member.wait() == (1, 2)
    assert member.offer((3, 2)), "it has just looked"
    monkeypatch.setattr(membership, "STUCK_S", -1.0)
    assert not member.offer((4, 2))


REMOTE_KEEPER = """
import sys
from meshlm.workers.distributed.membership import Meeting, Membership, meet
member = Membership()
member.offer(tuple(map(int, sys.argv[2:])))
print("begins", flush=True)
store = meet(member, Meeting(0, "/nowhere", ("127.0.0.2", int(sys.argv[1]))))
print("met", flush=True)
sys.stdin.read()
"""


def test_rank_0_is_killed_while_the_others_wait_in_its_store(tmp_path: Path) -> None:
    """Its next incarnation listens at the same port, and they find it."""
    port = free_port()
    member = Membership()

    def keeper(*incarnations: int) -> "subprocess.Popen[str]":
        words = [sys.executable, "-P", "-c", REMOTE_KEEPER, str(port), *map(str, incarnations)]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    place = Meeting(1, str(tmp_path), ("127.0.0.2", port))
    with ThreadPoolExecutor(1) as pool, keeper(1, 2, 3) as first:  # the third never comes
        assert first.stdout is not None
        assert first.stdout.readline() == "begins\n"
        member.offer((1, 2, 3))
        met = pool.submit(meet, member, place)
        while place._store is None:
            assert not met.done()
        first.kill()
        first.wait(LIMIT_S)
        member.withdraw()
        with keeper(4, 2) as second:
            member.offer((4, 2))
            met.result(LIMIT_S)
            assert second.stdout is not None
            assert second.stdout.read(11) == "begins\nmet\n"
            second.kill()
    assert member.committed == (4, 2)


def test_seats_of_a_group_that_spans_nodes() -> None:
    """dp 3 x tp 4 over two nodes: rank 1 has two workers on each."""
    parallel = ParallelConfig(
        data_parallel_size=3, tensor_parallel_size=4, nnodes=2, master_addr="10.0.0.1", master_port=700
    )
    node = Node(index=1, id="b", address="10.0.0.2", interface="eth7", workers=(6, 6))
    config = MeshConfig(parallel=parallel, node=node, run=RunConfig(run_dir="/run/x"))
    spanning, within = WorkerPlacement.of(config, 6, Membership()), WorkerPlacement.of(config, 9, Membership())
    assert spanning._meeting is not None
    assert within._meeting is not None
    assert (spanning._meeting._address, spanning._interface, spanning._number) == (("10.0.0.1", 701), "eth7", 0)
    assert spanning.shard == Shard(tp_rank=2, tp_size=4)
    assert (within._meeting._address, within._interface, within._number) == (None, None, 3)


def test_gloo_and_nccl_use_the_private_interface() -> None:
    assert _interface_names("eth7") == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "=eth7"}
    assert _interface_names(None) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert _interface_names("") == {}, "a network without names: they choose"


@pytest.mark.parametrize("disabled", [False, True])
def test_peers_memory_is_used_unless_it_is_disabled(disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Distributed] = []

    def try_peers(*given: Any) -> Distributed:
        tried.append(given[-1])
        return given[-1]  # type: ignore[no-any-return]

    monkeypatch.setattr(placing, "meet", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=object()))
    monkeypatch.setattr(connecting, "_say_hello", lambda *_: None)
    monkeypatch.setitem(sys.modules, "meshlm.workers.distributed.symmetric", SimpleNamespace(make_symmetric=try_peers))
    parallel = ParallelConfig(tensor_parallel_size=2, disable_custom_all_reduce=disabled)
    config = MeshConfig(parallel=parallel, run=RunConfig(run_dir="/nowhere"))
    placement = WorkerPlacement.of(config, 1, Membership())
    made = placement.connect(torch.device("cuda"), torch.bfloat16, 8, 64)
    assert isinstance(made, Distributed)
    assert tried == ([] if disabled else [made])
