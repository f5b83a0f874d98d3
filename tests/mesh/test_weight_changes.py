"""A trainer that sends what has changed alone: after each update the mesh's tokens are those of the trained model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from changing_weights import greedy_of, kill, not_ready, post, versions, write
from senders import Refused, dev, sender
from serving import serving
from split_models import PROMPTS, greedy
from waiting import until

pytestmark = pytest.mark.mesh
Changes = tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]


def trained(model: torch.nn.Module, seed: int) -> Iterator[Changes]:
    """Changes a few numbers of some of its weights, in place."""
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        count = 0 if "norm" in name else max(1, parameter.numel() // 20)
        places = torch.randperm(parameter.numel(), generator=random)[:count].to(torch.int32)
        values = torch.randn(count, generator=random) * 0.3
        parameter.data.view(-1)[places.long()] = values
        yield name, parameter.data, places, values


def test_changes(tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "model"
    first = write(folder, 0)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with serving(str(folder), *dev("gloo"), "-tp", "2") as server:
        assert greedy(server) == first
        with sender("gloo", server.url) as sends:
            for step in range(2):
                sends.send_changes(trained(model, step), f"step-{step}")
                second = [greedy_of(model, prompt) for prompt in PROMPTS]
                assert greedy(server) == second != first
            name, tensor, _, _ = next(trained(model, 9))
            wrong = (name, tensor, torch.tensor([tensor.numel()], dtype=torch.int32), torch.zeros(1))
            with pytest.raises(Refused, match="none of its"):
                sends.send_changes([wrong], "wrong")
            assert (greedy(server), versions(server)[0]) == (second, "step-1")
            kill(server, "worker")
            until(lambda: not_ready(server) == "" and {*versions(server)[1]} == {("step-1", "")}, 180)
            assert greedy(server) == second
        post(server, "/update_weights_from_disk", {"model_path": str(folder)})
        assert greedy(server) == first
