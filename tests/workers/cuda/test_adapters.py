"""Adapters on a GPU: logits are those of peft's modules, in graphs and without; steps of the base are as without adapters."""

import json
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from adapters import LIMITS, save_adapters

from meshlm import LLM, LoRARequest
from meshlm import SamplingParams as GivenParams
from meshlm.protocol.adapters import Adapter
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.sleeping import TAGS
from meshlm.runtime.errors import ProcessFatal
from meshlm.runtime.model_files.adapter_files import adapter_of

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import MODEL, Driver, engine, in_bfloat16, prompts_of, weights_of_reference

from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.triton_inputs import TritonInputs

pytestmark = pytest.mark.gpu
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"r": 16, "lora_alpha": 16, "target_modules": ALL},
    "some": {"r": 8, "lora_alpha": 16, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "odd": {"r": 5, "lora_alpha": 10, "target_modules": ["k_proj", "up_proj", "o_proj"]},
}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
LENGTHS = [40, 333, 129, 17]
ROWS = ["all", None, "some", "all"]


class Made(NamedTuple):
    engine: ModelEngine
    peft: Any
    adapters: dict[str, Adapter]

    def of(self, names: list[str | None]) -> dict[int, Adapter]:
        return {row: self.adapters[name] for row, name in enumerate(names) if name is not None}

    def prepare(self, names: list[str | None]) -> None:
        for name in dict.fromkeys(names):
            if name is not None:
                assert self.engine.extras.prepare(self.adapters[name]) is None

    def logits(self, name: str | None, tokens: list[int]) -> torch.Tensor:
        """float32 [2, tokens, vocab]: peft's, exactly, and computed in bfloat16."""
        found = []
        for model in self.peft:
            ids = torch.tensor([tokens]).cuda()
            if name is None:
                with model.disable_adapter():
                    found.append(model(ids).logits[0].float())
            else:
                model.set_adapter(name)
                found.append(model(ids).logits[0].float())
        return torch.stack(found)


def make(folder: Path, **settings: object) -> Made:
    """An engine, and peft's modules around transformers' model with the same weights, in float32 and in bfloat16."""
    import transformers

    made = engine(folder, None, enable_lora=True, max_loras=2, **settings)
    config = {key: value for key, value in MODEL.items() if key not in ("architectures", "torch_dtype")}
    pair = []
    for rounded in (False, True):
        theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config)).eval()
        theirs.load_state_dict(weights_of_reference(made), strict=False)
        peft = save_adapters(theirs, folder / "adapters", CONFIGS, 0.05).cuda()
        pair.append(in_bfloat16(peft) if rounded else peft)
    known = {name: adapter_of(name, folder / "adapters" / name, made.resolved.spec, LIMITS) for name in CONFIGS}
    return Made(made, pair, known)


@pytest.fixture(scope="module", params=["FULL", "NONE"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    found = make(tmp_path_factory.mktemp("model"), cudagraph_mode=request.param)
    while found.engine.idle():
        pass
    return found


def served(made: Made, names: list[str | None], steps: int = 6, prompts: list[list[int]] | None = None) -> Driver:
    """Prompts of rows with these adapters in one step, then decodes."""
    made.engine.reset()
    made.prepare(names)
    prompts = prompts_of(LENGTHS[: len(names)]) if prompts is None else prompts
    driver = Driver(made.engine, prompts, GREEDY, adapters=made.of(names))
    driver.step({row: len(prompt) for row, prompt in enumerate(prompts)})
    for _ in range(steps):
        driver.step(dict.fromkeys(range(len(prompts)), 1))
    return driver


def check(made: Made, driver: Driver, names: list[str | None]) -> None:
    """No further from peft's float32 than peft itself in bfloat16, but for a little."""
    for row, name in enumerate(names):
        seen = [one for one in driver.seen if one.row == row]
        tokens = driver.prompts[row] + driver.tokens[row][:-1]
        exact, rounded = made.logits(name, tokens)
        places = [one.length - 1 for one in seen]
        ours = (torch.stack([one.logits for one in seen]) - exact[places]).abs().mean()
        theirs = (rounded[places] - exact[places]).abs().mean()
        assert ours <= 1.3 * theirs, f"row {row} ({name}): mean error {ours:.4f}, peft's own {theirs:.4f}"


def test_logits_are_pefts(made: Made) -> None:
    before = dict(made.engine.graphs.replays)
    driver = served(made, ROWS)
    check(made, driver, ROWS)
    base, own = made.logits(None, driver.prompts[0])[0], made.logits("all", driver.prompts[0])[0]
    assert (base - own).abs().mean() > 0.02 * base.abs().mean(), "the adapters are to be no trifle"
    replayed = made.engine.graphs.replays["decode_adapters"] - before.get("decode_adapters", 0)
    assert replayed == (6 if made.engine.graphs.keys else 0)


def test_odd_ranks_and_modules(made: Made) -> None:
    names: list[str | None] = ["odd", "some", None, "odd"]
    check(made, served(made, names), names)


def test_mixed_rows_are_as_alone(made: Made) -> None:
    beside, prompts = served(made, ROWS, 0), prompts_of(LENGTHS)
    for row, name in enumerate(ROWS):
        alone = served(made, [name], 0, [prompts[row]])
        (mine,) = [one.logits for one in beside.seen if one.row == row]
        torch.testing.assert_close(mine, alone.seen[0].logits, atol=0.06, rtol=0.06)


def test_steps_of_the_base_are_those_without_adapters(made: Made, tmp_path: Path) -> None:
    """To the last bit, and in the same graphs."""
    mode = made.engine.config.worker.cudagraph_mode
    plain = engine(tmp_path, cudagraph_mode=mode)
    while plain.idle():
        pass
    before = dict(made.engine.graphs.replays)
    ours, prompts = served(made, [None] * 4), prompts_of(LENGTHS)
    theirs = Driver(plain, prompts, GREEDY)
    theirs.step(dict(enumerate(LENGTHS)))
    for _ in range(6):
        theirs.step(dict.fromkeys(range(4), 1))
    assert ours.tokens == theirs.tokens
    for mine, other in zip(ours.seen, theirs.seen, strict=True):
        assert torch.equal(mine.logits, other.logits)
    after = made.engine.graphs.replays
    assert {kind for kind, count in after.items() if count != before.get(kind, 0)} <= {"decode", "mixed"}


def test_no_step_waits_for_the_device(made: Made) -> None:
    made.engine.reset()
    made.prepare(ROWS)
    driver = Driver(made.engine, prompts_of(LENGTHS), GREEDY, adapters=made.of(ROWS))
    driver.strict = True
    driver.step(dict(enumerate(LENGTHS)))
    driver.step(dict.fromkeys(range(4), 1))


def test_loads_beside_steps_change_nothing(made: Made) -> None:
    """Rows of one adapter and of the base go on while others are brought in and pushed out."""
    names: list[str | None] = ["all", None]
    expected = served(made, names, 40)
    failed: list[object] = []

    def load() -> None:
        for nth in range(30):
            adapter = made.adapters[("some", "odd")[nth % 2]]
            failed.extend(filter(None, [made.engine.extras.prepare(adapter)]))
            made.engine.extras.drop(adapter.digest)

    made.engine.reset()
    made.prepare(names)
    driver = Driver(made.engine, prompts_of(LENGTHS[:2]), GREEDY, adapters=made.of(names))
    driver.step({0: LENGTHS[0], 1: LENGTHS[1]})
    loader = threading.Thread(target=load)
    loader.start()
    for _ in range(40):
        driver.step({0: 1, 1: 1})
    loader.join(60)
    assert not loader.is_alive()
    assert not failed
    assert driver.tokens == expected.tokens
    check(made, served(made, ["odd"]), ["odd"])


def test_slots_are_used_again(made: Made) -> None:
    """More adapters than slots, one after the other: each is right, and the GPU's memory stays as it is."""
    inputs = made.engine.inputs
    assert isinstance(inputs, TritonInputs)
    assert inputs.adapters is not None
    assert inputs.adapters.count == 3
    served(made, ["all"])
    held = torch.cuda.memory_allocated()
    for name in ("some", "odd", "all", "odd", "some"):
        for adapter in made.adapters.values():
            made.engine.extras.drop(adapter.digest)
        check(made, served(made, [name], 2), [name])
    assert torch.cuda.memory_allocated() - held < 1 << 20


def test_sleep(made: Made) -> None:
    before = served(made, ROWS)
    made.engine.reset()
    made.engine.be_without(TAGS)
    assert made.engine.extras.prepare(made.adapters["odd"]) is None, "it waits in the host's memory"
    made.engine.be_without(())
    after = served(made, ROWS)
    assert after.tokens == before.tokens
    names: list[str | None] = ["odd"]
    check(made, served(made, names), names)


def test_kernels_that_are_wrong_end_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshlm.kernels.lora import self_test

    monkeypatch.setattr(self_test, "add_adapters", lambda x, out, *rest: out)
    with pytest.raises(ProcessFatal, match="--enable-lora: on this GPU products of adapters with 1024 inputs"):
        engine(tmp_path, enable_lora=True)


def test_drafts_beside_adapters(tmp_path: Path) -> None:
    """Greedy texts are those of steps without drafts, but for rounding."""
    asked = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    found = make(tmp_path, speculative_config=json.dumps(asked))
    while found.engine.idle():
        pass
    driver = served(found, ROWS)
    check(found, driver, ROWS)


def test_float32_is_computed_by_plain_torch(tmp_path: Path) -> None:
    found = make(tmp_path, dtype="float32")
    assert not isinstance(found.engine.inputs, TritonInputs)
    driver = served(found, ROWS, 3)
    for row, name in enumerate(ROWS):
        (first, *_) = [one for one in driver.seen if one.row == row]
        exact = found.logits(name, driver.prompts[row])[0, -1]
        torch.testing.assert_close(first.logits, exact, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs several CUDA devices")
def test_two_ranks(tmp_path: Path) -> None:
    """A and B are split as their layers are: tokens are those of one GPU, but where two are as likely."""
    import tokenizers
    import transformers

    torch.manual_seed(0)
    config = {key: value for key, value in MODEL.items() if key not in ("architectures", "torch_dtype")}
    theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config, initializer_range=0.05))
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    save_adapters(theirs.float(), tmp_path / "adapters", CONFIGS, 0.05)
    requests = [LoRARequest(name, nth + 1, str(tmp_path / "adapters" / name)) for nth, name in enumerate(CONFIGS)]
    prompts, given = prompts_of([20 + 7 * nth for nth in range(12)]), [*requests, None] * 3
    params = GivenParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    texts = []
    for ranks in (1, 2):
        llm = LLM(
            str(tmp_path), device="cuda", dtype="bfloat16", max_model_len=512, kv_cache_memory=1 << 28, enable_lora=True,
            max_loras=3, tensor_parallel_size=ranks,
        )  # fmt: skip
        try:
            answers = llm.generate(prompts, params, lora_request=given, use_tqdm=False)
        finally:
            llm.shutdown()
        texts.append([list(answer.outputs[0].token_ids) for answer in answers])
    firsts = [one[0] == other[0] for one, other in zip(*texts, strict=True)]
    assert sum(firsts) >= len(firsts) - 1
    pairs = [(mine, its) for one, other in zip(*texts, strict=True) for mine, its in zip(one, other, strict=True)]
    assert sum(mine == its for mine, its in pairs) >= 0.6 * len(pairs), "what follows a near tie differs"
