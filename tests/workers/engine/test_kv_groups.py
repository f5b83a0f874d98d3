"""Models with sliding windows behind a scheduler: blocks are freed while requests run, and tokens stay transformers' own.

What no request needs any more is overwritten with NaN before each step, so whoever reads a freed block is seen.
"""

from pathlib import Path
from typing import Any

import pytest
from served_engines import AGAIN, BLOCK, OUTPUT, PROMPTS, WINDOW, Engines, Reference, made, served
from small_models import GEMMA, GEMMA3N, GEMMA4, MOE

from meshlm.protocol.kv import ChunkedAttention, FullAttention, SlidingWindow

CHUNK = 20  # tokens, of which some have a block in two chunks
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", {"sliding_window": WINDOW, "num_hidden_layers": 4}),
    "gemma2": (
        "Gemma2Config",
        {**GEMMA, "sliding_window": WINDOW, "num_hidden_layers": 4, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "sliding_window": WINDOW, "num_hidden_layers": 8}),
    "llama4": (
        "Llama4TextConfig",
        {
            **MOE["llama4"][1],
            "num_hidden_layers": 4,
            "attention_chunk_size": CHUNK,
            "no_rope_layers": [1, 0, 1, 0],
            "floor_scale": 20,
        },
    ),
    "gemma4": (  # layers that see all take half the bytes of those that slide, on two ranks too
        "Gemma4TextConfig",
        {**GEMMA4["gemma4-dense"][1], "sliding_window": WINDOW, "num_attention_heads": 8, "num_key_value_heads": 8}
        | {"num_global_key_value_heads": 2},
    ),
    "gpt-oss": ("GptOssConfig", {**MOE["gpt-oss"][1], "sliding_window": WINDOW, "num_hidden_layers": 4}),
}
PAGES = {"mistral": 9, "gemma2": 23, "gemma3": 82, "gpt-oss": 23, "llama4": 26, "gemma4": 40}


@pytest.fixture(params=CASES, scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Reference]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, made(CASES[request.param], folder)


@pytest.mark.parametrize(("backend", "tp", "pp"), [("cpu", 1, 1), ("torch", 1, 1), ("cpu", 2, 1), ("torch", 1, 2)])
def test_tokens_are_transformers(model: tuple[str, Path, Reference], backend: str, tp: int, pp: int) -> None:
    case, folder, expected = model
    engines = Engines(folder, PAGES[case], backend, tp, pp)
    try:
        bench = served(engines, pp)
    finally:
        engines.close()
    local = ChunkedAttention(CHUNK) if case == "llama4" else SlidingWindow(WINDOW)
    assert local in engines.kv_specs
    assert (FullAttention() in engines.kv_specs) == (case != "mistral")
    assert bench.tokens == expected.greedy(bench.tokens)
    assert bench.core.batching.num_preemptions > 0, "memory was to be too little"
    assert bench.cached[AGAIN[-1]] > 4 * WINDOW, "too little was found in the prefix cache"
    whole = len(engines.kv_specs) * -(-(len(PROMPTS[-1]) + OUTPUT) // BLOCK)
    assert engines.num_blocks < whole, "one request alone would not fit if all blocks were kept"


@pytest.mark.parametrize(
    ("case", "first_shared"), [(("Gemma3nTextConfig", GEMMA3N), 4), (GEMMA4["gemma4-e2b"], 2)], ids=["3n", "4"]
)
def test_layers_that_share_have_no_memory_of_their_own(
    case: tuple[str, dict[str, Any]], first_shared: int, tmp_path: Path
) -> None:
    """The last two layers use keys and values of the last ones of their kinds, in whose groups and pages they are."""
    expected = made((case[0], case[1] | {"sliding_window": WINDOW}), tmp_path)
    engines = Engines(tmp_path, 23, "torch")
    try:
        bench = served(engines)
    finally:
        engines.close()
    assert bench.tokens == expected.greedy(bench.tokens)
    assert bench.core.batching.num_preemptions > 0, "memory was to be too little"
    assert bench.cached[AGAIN[-1]] > 4 * WINDOW, "too little was found in the prefix cache"
    caches = engines.engines[0].compute.caches
    source = slice(first_shared - 2, first_shared)
    assert [cache.keys.data_ptr() for cache in caches[first_shared:]] == [c.keys.data_ptr() for c in caches[source]]
    assert [cache.group for cache in caches[first_shared:]] == [cache.group for cache in caches[source]]
    assert len({(cache.keys.data_ptr(), cache.group) for cache in caches}) == first_shared
