"""Two meshes of one model whose -tp differs: pages go between them head by head, and the tokens are those of the whole model."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_answers import complete
from serving import Serving, serving
from split_models import COUNT, FLAGS, PROMPTS, SHAPE, reference, small_model
from waiting import free_ports, until

pytestmark = pytest.mark.mesh
LONG = PROMPTS[3]  # 130 tokens: eight blocks


def loaded(server: Serving) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(("meshlm:kv_loaded_blocks{", "meshlm:kv_loaded_blocks_total{"))
    )


def mesh(stack: ExitStack, model: str, tp: int, config: dict[str, Any]) -> Serving:
    flags = ("--load-format", "dummy", *FLAGS, "-tp", str(tp), "--kv-transfer-config", json.dumps(config))
    return stack.enter_context(serving(model, *flags, "--enable-prompt-tokens-details"))


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1)])
def test_params_that_a_proxy_passes(kind: str, theirs: int, ours: int, tmp_path: Path) -> None:
    model = small_model(tmp_path, kind)
    with ExitStack() as stack:
        p, d = (
            mesh(stack, model, tp, {"kv_connector": "NixlConnector", "kv_role": role, "kv_port": 0})
            for tp, role in ((theirs, "kv_producer"), (ours, "kv_consumer"))
        )
        leaves = {"do_remote_decode": True, "do_remote_prefill": False}
        params = complete(p, LONG, 1, kv_transfer_params=leaves, temperature=0)["kv_transfer_params"]
        answer = complete(d, LONG, COUNT, kv_transfer_params=params, temperature=0)
        assert answer["choices"][0]["token_ids"] == reference(model, LONG)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
        assert loaded(d) > 0
        until(lambda: _used(p) == 0)


def _used(server: Serving) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if "kv_cache_blocks{" in line and 'state="used"' in line)


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1)])
def test_pages_that_are_sent(theirs: int, ours: int, tmp_path: Path) -> None:
    model, first = small_model(tmp_path, "llama"), free_ports(4, "127.0.0.1")
    ports = first, first + 2
    with ExitStack() as stack:
        p, d = (
            mesh(stack, model, tp, {"kv_connector": "P2pNcclConnector", "kv_role": role, "kv_port": port})
            for tp, role, port in ((theirs, "kv_producer", ports[0]), (ours, "kv_consumer", ports[1]))
        )
        name = f"cmpl-___prefill_addr_127.0.0.1:{ports[0]}___decode_addr_127.0.0.1:{ports[1]}_{'0' * 32}"
        said = []
        for server, count in ((p, 1), (d, COUNT)):
            body = {"prompt": LONG, "max_tokens": count, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
            answer = httpx.post(
                f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": name}, timeout=300
            ).json()
            said.append(answer)
        assert said[1]["choices"][0]["token_ids"] == reference(model, LONG)
        assert said[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
        assert loaded(d) > 0


def test_models_whose_pages_are_not_cut_are_refused_by_name(tmp_path: Path) -> None:
    """Layers with unequal heads: the decode mesh says so, and computes the prompt."""
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
    heads = {"num_global_key_value_heads": 2, "global_head_dim": 16, "attention_k_eq_v": True}
    config = {**SHAPE, **layers, **heads, "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"}
    model = small_model(tmp_path, "llama")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with ExitStack() as stack:
        p, d = (
            mesh(stack, model, tp, {"kv_connector": "NixlConnector", "kv_role": role, "kv_port": 0})
            for tp, role in ((1, "kv_producer"), (2, "kv_consumer"))
        )
        leaves = {"do_remote_decode": True, "do_remote_prefill": False}
        params = complete(p, LONG, 1, kv_transfer_params=leaves, temperature=0)["kv_transfer_params"]
        answer = complete(d, LONG, 4, kv_transfer_params=params, temperature=0)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        d.wait_for("-tp is 1 there and 2 here, and pages of this model")
