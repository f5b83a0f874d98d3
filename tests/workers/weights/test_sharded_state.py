"""Weights that were saved as each worker has them are the worker's again; those of another worker are refused by name."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from model_folders import resolve_model
from safetensors.torch import load_file, save_file
from sharded_models import shards
from small_models import CPU, SMALL, resolved_of_files

from meshlm.protocol.config import Resolved
from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.supervisor.cli import offline
from meshlm.supervisor.cli.main import run
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights import sharded_state
from meshlm.workers.weights.load import load_model
from meshlm.workers.weights.sharded_state import save_rank

Values = dict[str, object]


def saved(tmp_path: Path, **values: Any) -> Path:
    """The model's folder, beside which is what was saved."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    config = SMALL | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    (folder / "config.json").write_text(json.dumps(config))
    given = {"model": str(folder), "load_format": "dummy", "device": "cpu"}
    settled = resolve.resolve(flags.build(given | values, None))

    def in_this_process(request: Any) -> None:
        save_rank(request.config, request.rank, Path(request.folder), request.max_bytes, load_model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline, "_save_rank", in_this_process)
        offline.save(settled, tmp_path / "saved", 20_000)
    return folder


def model(folder: Path, load_format: str, shard: Shard, **changes: Any) -> Decoder:
    found: Resolved = msgspec.structs.replace(
        resolved_of_files(resolve_model(str(folder), load_format=load_format)), **changes
    )
    with torch.inference_mode():
        return load_model(found, CPU, 0, lambda done, total: None, shard)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 3)])
def test_each_worker_has_its_own_again(tp: int, pp: int, tmp_path: Path) -> None:
    folder = saved(tmp_path, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    assert len(list((tmp_path / "saved").glob("model-rank-0-part-*.safetensors"))) > 2
    assert (tmp_path / "saved" / "config.json").read_text() == (folder / "config.json").read_text()
    for shard in shards(tp, pp):
        wanted = dict(model(folder, "dummy", shard).named_parameters())
        found = dict(model(tmp_path / "saved", "sharded_state", shard).named_parameters())
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            assert torch.equal(found[name], values), name


def test_weights_that_were_quantised_are_not_quantised_again(tmp_path: Path) -> None:
    folder = saved(tmp_path, quantization="fp8")
    given: Values = {"device": "cpu", "quantization": "fp8"}
    specs = [
        resolve.resolve(flags.build(given | {"model": str(path), "load_format": kind}, None)).resolved
        for path, kind in ((folder, "dummy"), (tmp_path / "saved", "sharded_state"))
    ]
    with torch.inference_mode():
        first, second = (
            load_model(spec, CPU, 0, lambda done, total: None, prepare=False) for spec in specs if spec is not None
        )
    assert any(values.dtype == torch.float8_e4m3fn for values in second.parameters())
    for (name, wanted), values in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(wanted.float(), values.float()), name
    with pytest.raises(
        ProcessFatal, match=r"part-0.safetensors: it was saved for quantization 'fp8', and '' is wanted"
    ):
        model(tmp_path / "saved", "sharded_state", Shard())


def test_files_whose_tensors_are_laid_out_otherwise_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    monkeypatch.setattr(sharded_state, "LAYOUT", sharded_state.LAYOUT + 1)
    with pytest.raises(ProcessFatal, match=f"it was saved for layout {sharded_state.LAYOUT - 1}, and "):
        model(tmp_path / "saved", "sharded_state", Shard())


def test_files_of_another_worker_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, tensor_parallel_size=2)
    folder = tmp_path / "saved"
    with pytest.raises(ModelFilesError, match="it holds weights by rank; --load-format sharded_state reads them"):
        resolve_model(str(folder))
    with pytest.raises(ProcessFatal, match="it was saved for tensor_parallel_size 2, and 1 is wanted"):
        model(folder, "sharded_state", Shard())
    with pytest.raises(ProcessFatal, match="it was saved for dtype 'float32', and 'float16' is wanted"):
        model(folder, "sharded_state", Shard(0, 2), dtype="float16")
    last = max(folder.glob("model-rank-1-part-*"), key=lambda file: int(file.stem.rpartition("-")[2]))
    kept = last.read_bytes()
    last.write_bytes(kept[:-8])
    with pytest.raises(ProcessFatal, match=f"{last.name}: cannot be read, perhaps cut short"):
        model(folder, "sharded_state", Shard(1, 2))
    save_file(load_file(folder / "model-rank-0-part-0.safetensors"), last)
    with pytest.raises(ProcessFatal, match=f"{last.name}: `meshlm save-sharded-state` has not written it"):
        model(folder, "sharded_state", Shard(1, 2))
    last.unlink()
    with pytest.raises(ProcessFatal, match=r"tensor .* is missing"):
        model(folder, "sharded_state", Shard(1, 2))
    (folder / "model-rank-1-part-0.safetensors").unlink()
    with pytest.raises(
        ProcessFatal, match=r"model-rank-1-part-0.safetensors is not there; `meshlm save-sharded-state`"
    ):
        model(folder, "sharded_state", Shard(1, 2))


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A process for each rank loads and writes."""
    folder = saved(tmp_path)
    words = [
        "save-sharded-state",
        str(folder),
        "--load-format",
        "dummy",
        "--device",
        "cpu",
        "--output",
        str(tmp_path / "out"),
    ]
    assert run(words) == 0
    assert load_file(tmp_path / "out" / "model-rank-0-part-0.safetensors")
    assert "serve it with --load-format sharded_state" in capfd.readouterr().out
    assert run(words) == 2
    assert "--output" in capfd.readouterr().err
    words[1:4] = [str(tmp_path / "saved"), "--load-format", "sharded_state"]
    words[-1] = str(tmp_path / "again")
    assert run(words) == 2
    assert "(sharded_state) has no state that could be saved" in capfd.readouterr().err
