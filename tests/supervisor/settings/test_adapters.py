"""--enable-lora and --lora-modules: what is read of them, and what is refused before a process starts."""

from pathlib import Path
from typing import Any

import pytest
from adapter_folders import folder_of
from model_folders import folder_with

from meshlm.protocol.config import MeshConfig
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, resolve


@pytest.fixture
def model(tmp_path: Path) -> str:
    return folder_with(tmp_path / "model")


def resolved(model: str, *modules: str, **values: Any) -> MeshConfig:
    values = {"enable_lora": True, "lora_modules": modules, "device": "cpu", **values}
    return resolve.resolve(flags.build({"model": model, "load_format": "dummy", **values}, None))


def test_adapters_by_words_and_by_json(model: str, tmp_path: Path) -> None:
    one, two = folder_of(tmp_path / "one", inputs=64), folder_of(tmp_path / "two", inputs=64, lora_alpha=3)
    more = f'{{"name": "b", "path": "{two}", "base_model_name": "x"}}'
    found = resolved(model, f"a={one}", more, f'[{{"name": "c", "path": "{one}"}}]').require_resolved().adapters
    assert [(adapter.name, adapter.path) for adapter in found] == [("a", str(one)), ("b", str(two)), ("c", str(one))]
    assert found[0].digest == found[2].digest != found[1].digest


@pytest.mark.parametrize(
    ("modules", "values", "said"),
    [
        (["a"], {}, "--lora-modules a: name=folder is expected"),
        (["=x"], {}, "--lora-modules =x: name=folder is expected"),
        (["{"], {}, "--lora-modules {: "),
        (['{"name": "a"}'], {}, "each needs a name and a path"),
        (['{"name": "a", "path": "x", "rank": 1}'], {}, "unknown key rank; there are name, path and base_model_name"),
        (["a=/none"], {}, "--lora-modules: /none: there is no such folder"),
        (["a=HERE", "a=HERE"], {}, "the name a is taken"),
        (["model=HERE"], {"served_model_name": ("model",)}, "the name model is taken"),
        ([" a=HERE"], {}, "a name has 1 to 256 printable characters"),
        (["a=HERE"], {"max_lora_rank": 1}, "has rank 4; --max-lora-rank is 1"),
        (["a=HERE"], {"enable_lora": False}, "--lora-modules: needs --enable-lora"),
        (
            [],
            {"device": "fake"},
            "--enable-lora: --device fake has no products of adapters; --device cpu and cuda have",
        ),
        ([], {"lora_resolver_dir": "HERE"}, "--lora-resolver-dir: needs --allow-runtime-lora-updating"),
        (
            [],
            {"lora_resolver_dir": "/none", "allow_runtime_lora_updating": True},
            "--lora-resolver-dir /none: there is no such folder",
        ),
        ([], {"runner": "pooling"}, "--enable-lora: models of vectors take no adapters yet"),
        ([], {"deterministic": True}, "--enable-lora: not proven to be deterministic"),
        ([], {"max_loras": 3, "max_cpu_loras": 2}, "--max-cpu-loras 2: must be at least --max-loras, which is 3"),
    ],
)
def test_refused(model: str, modules: list[str], values: dict[str, Any], said: str, tmp_path: Path) -> None:
    here = folder_of(tmp_path / "here", inputs=64)
    with pytest.raises(UsageError) as error:
        resolved(model, *(word.replace("HERE", str(here)) for word in modules), **values)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_without_it_its_settings_are_said_to_do_nothing(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    resolved(model, enable_lora=False, max_loras=4)
    assert "without effect here: --max-loras (it is of --enable-lora)" in capsys.readouterr().err
