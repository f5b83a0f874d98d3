"""LLM without processes: a script with the same seed that runs again draws the same; what is refused before anything is sent."""

from types import SimpleNamespace
from typing import Any

import pytest

from meshlm.protocol.config import MeshConfig
from meshlm.supervisor.api import llm as llm_module
from meshlm.supervisor.api.llm import LLM
from meshlm.supervisor.api.offline_prompts import of_generate
from meshlm.supervisor.api.sampling import SamplingParams


@pytest.fixture
def llm_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec, none = SimpleNamespace(vocab_size=9), {"speech": None, "pooling": None, "num_speculative_tokens": 0}
    resolved = SimpleNamespace(eos_token_ids=(), logits_processors=(), spec=spec, **none)

    def resolve(config: MeshConfig, at_most: int | None) -> Any:
        given = {name: getattr(config, name) for name in ("model", "scheduler", "server", "worker")}
        return SimpleNamespace(**given, require_resolved=lambda: resolved)

    client = SimpleNamespace(new_handle=iter(range(1, 100)).__next__)
    monkeypatch.setattr("meshlm.supervisor.settings.resolve.for_mesh", resolve)
    monkeypatch.setattr(
        llm_module,
        "Background",
        lambda config: SimpleNamespace(config=config, supervisor=None, client=client, stop=lambda: None),
    )
    return LLM


def seeds(llm: LLM, params: SamplingParams) -> list[int]:
    made = llm._submits.of(iter([of_generate("a"), of_generate("a")]), [params] * 2, [0, 0])
    return [submit.sampling.seed for submit, _, _ in made]


def test_draws_follow_the_seed(llm_of: Any) -> None:
    first, second = llm_of(model="m", seed=3), llm_of(model="m", seed=3)
    before = seeds(first, SamplingParams())
    assert before == seeds(second, SamplingParams())
    assert len({*before, *seeds(first, SamplingParams())}) == 4
    assert before != seeds(llm_of(model="m", seed=4), SamplingParams())


def test_without_a_seed_it_is_0_as_in_vllm(llm_of: Any) -> None:
    assert seeds(llm_of(model="m"), SamplingParams()) == seeds(llm_of(model="m", seed=0), SamplingParams())


def test_a_prompts_own_seed_wins(llm_of: Any) -> None:
    assert seeds(llm_of(model="m", seed=3), SamplingParams(seed=7)) == [7, 7]


def test_a_property_that_the_engine_does_not_promise_is_refused(llm_of: Any) -> None:
    with pytest.raises(ValueError, match=r"^SamplingParams.deterministic: the engine was made without LLM\(determin"):
        llm_of(model="m").generate("a", SamplingParams(deterministic=True), use_tqdm=False)


def test_priorities_need_their_policy(llm_of: Any) -> None:
    """As over HTTP: they would be ignored."""
    with pytest.raises(ValueError, match=r"^priority: requests wait in order of arrival"):
        llm_of(model="m").generate(["a", "b"], SamplingParams(), priority=[1, 0])
    with pytest.raises(AttributeError, match="ask"):  # here nobody answers
        llm_of(model="m", scheduling_policy="priority").generate("a", SamplingParams(), priority=[1], use_tqdm=False)
    with pytest.raises(AttributeError, match="ask"):
        llm_of(model="m").generate("a", SamplingParams(), priority=[0], use_tqdm=False)
