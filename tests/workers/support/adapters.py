"""Adapters that peft makes of small models, and requests for them at engines behind a scheduler."""

import warnings
from pathlib import Path
from typing import Any

import torch
from bench import COORDINATOR, DETOKENIZER, LIFE, WORKER, Bench, limits
from served_engines import AGAIN, LENGTH, OUTPUT, PROMPTS, STEP, Engines

from meshlm.protocol.adapters import Adapter
from meshlm.protocol.edges.admit import Assign, EngineRequest
from meshlm.protocol.edges.step import ExtraReady, PrepareExtra
from meshlm.protocol.model import ModelSpec
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Handle, RequestId
from meshlm.runtime.model_files.adapter_files import Limits, adapter_of
from meshlm.runtime.process.events import Received, Send

LIMITS = Limits(16)


def save_adapters(
    theirs: Any, folder: Path, configs: dict[str, dict[str, Any]], size: float = 0.25, *, with_base: bool = False
) -> Any:
    """peft's model of `theirs` with an adapter of each of these settings, none of which leaves the model as it is. They are saved in
    folders of their names. size: the standard deviation of A and B. with_base: with the base's tables, where they are adapted."""
    import peft

    found: Any = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, whose older names peft uses
        warnings.simplefilter("ignore", UserWarning)  # that weights are tied
        warnings.filterwarnings(
            "ignore", "The following .*_pattern keys", RuntimeWarning
        )  # peft forgets parameters there
        for name, settings in configs.items():
            config = peft.LoraConfig(**settings)
            if found is None:
                found = peft.get_peft_model(theirs, config, adapter_name=name)
            else:
                found.add_adapter(name, config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in found.named_parameters():
        if any(word in name for word in (".lora_", "modules_to_save", "trainable_tokens_delta")):
            values = torch.randn(parameter.shape, generator=generator)
            if ".lora_" not in name:
                values *= float(parameter.data.std()) / size  # as large as the base's
            # of DoRA: lengths, that are to be others than those of the base's rows
            parameter.data = parameter.data * (1 + values / 4) if "magnitude" in name else values * size
    found.save_pretrained(folder, save_embedding_layers=with_base)
    return found.eval()


def adapter_in(folder: Path, name: str, spec: ModelSpec) -> Adapter:
    return adapter_of(name, folder / name, spec, LIMITS)


class AdapterBench(Bench):
    """Its workers prepare what they are asked to, at once."""

    model: Engines

    def take(self, sends: list[Send]) -> None:
        super().take(sends)
        for send in sends:
            if isinstance(send.message, PrepareExtra):
                asked = send.message
                failed = [engine.extras.prepare(asked.extra) for engine in self.model.engines]
                why = next((one for one in failed if one is not None), None)
                self.event(Received(WORKER, LIFE, ExtraReady(asked.session, asked.number, why)))

    def ask(self, handle: int, prompt: list[int], adapter: Adapter | None) -> None:
        sampling, extras = SamplingParams(max_tokens=OUTPUT, temperature=0.0), () if adapter is None else (adapter,)
        name, ids = RequestId(f"r{handle}"), pack_i32(prompt)
        work = EngineRequest(name, Handle(handle), ids, sampling, arrival_s=float(handle), extras=extras)
        self.event(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)))


def served_with(engines: Engines, adapters: dict[int, Adapter | None], slots: int, stages: int = 1) -> AdapterBench:
    """All prompts at once, each with the adapter of its number, in chunks; then the longest again, behind what it left, for each
    adapter."""
    bounds = limits(max_model_len=LENGTH, max_num_batched_tokens=STEP, num_stages=stages, max_loras=slots)
    bench = AdapterBench(bounds, 0, 0, model=engines)
    engines.cached = bench.directory._hashes
    for nth, prompt in enumerate(PROMPTS):
        bench.ask(nth, prompt, adapters[nth])
    bench.finish()
    for handle in AGAIN:
        bench.ask(handle, PROMPTS[-1], adapters[handle])
        bench.finish()
    return bench


def greedy(theirs: Any, prompt: list[int], tokens: list[int], adapter: str | None) -> list[int]:
    """The tokens themselves, where each is the likeliest behind those before it; else what they begin to differ by."""
    text = torch.tensor([prompt + tokens[:-1]])
    with torch.no_grad():
        if adapter is None:
            with theirs.disable_adapter():
                logits = theirs(text).logits
        else:
            theirs.set_adapter(adapter)
            logits = theirs(text).logits
    likeliest: list[int] = logits[0, len(prompt) - 1 :].argmax(-1).tolist()
    return likeliest
