"""Adapters that are found when a request names them: by folder and by plug-ins, once at a time, and never outside of the folder."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from adapter_folders import folder_of
from parsing import RESOLVED

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.requests.adapters import Adapters
from meshlm.frontend.requests.resolving import Resolving
from meshlm.protocol.adapters import AdapterList
from meshlm.protocol.config import AdapterConfig, MeshConfig
from meshlm.runtime.adapter_resolvers import AdapterResolver, FolderResolver, make

BAD = ("", ".", "..", "../one", "one/..", "/etc", "a//b", "x\x00", "\n", "y" * 400, "none")


def config(folder: Path, **values: Any) -> MeshConfig:
    values = {"enable_lora": True, "allow_runtime_lora_updating": True, **values}
    return MeshConfig(adapters=AdapterConfig(lora_resolver_dir=str(folder), **values), resolved=RESOLVED)


class Counted(AdapterResolver):
    """Gives one folder for all names, or raises."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.asked = folder, list[str]()

    def resolve(self, name: str) -> Path | None:
        self.asked.append(name)
        if self.folder is None:
            raise RuntimeError("broken")
        return self.folder


def backend(folder: Path) -> Any:
    """One whose coordinator takes each list at once."""
    adapters = Adapters()
    adapters.begin(RESOLVED)

    def send(known: AdapterList) -> None:
        adapters.heard(known)

    operations = SimpleNamespace(tell_coordinator=send)
    return SimpleNamespace(config=config(folder), resolved=RESOLVED, adapters=adapters, operations=operations)


def test_a_folder_gives_its_own_folders_alone(tmp_path: Path) -> None:
    (tmp_path / "in" / "team").mkdir(parents=True)
    folder_of(tmp_path / "in" / "one")
    folder_of(tmp_path / "in" / "team" / "two")
    folder_of(tmp_path / "out")
    resolver = FolderResolver(config(tmp_path / "in"))
    assert resolver.resolve("one") == tmp_path / "in" / "one"
    assert resolver.resolve("team/two") == tmp_path / "in" / "team" / "two"
    assert [resolver.resolve(name) for name in (*BAD, "../out", "team", "one/../../out")] == [None] * (len(BAD) + 3)


def test_none_are_made_where_adapters_do_not_come(tmp_path: Path) -> None:
    assert [type(one) for one in make(config(tmp_path), {"MESHLM_PLUGINS": ""})] == [FolderResolver]
    assert make(config(tmp_path, allow_runtime_lora_updating=False), {"MESHLM_PLUGINS": ""}) == ()


async def test_one_name_is_looked_for_once_at_a_time(tmp_path: Path) -> None:
    hidden = RESOLVED.spec.hidden_size
    broken, found = Counted(None), Counted(folder_of(tmp_path / "one", inputs=hidden))
    resolving, served = Resolving((broken, found)), backend(tmp_path)
    assert await asyncio.gather(*(resolving.found("sql", served) for _ in range(5))) == [True] * 5
    assert (broken.asked, found.asked) == (["sql"], ["sql"])
    assert served.adapters.find("sql").path == str(tmp_path / "one")
    assert resolving._turns == {}


async def test_what_cannot_be_served_is_said(tmp_path: Path) -> None:
    bad = Counted(folder_of(tmp_path / "bad", inputs=RESOLVED.spec.hidden_size, peft_type="IA3"))
    with pytest.raises(HttpError, match="peft_type is 'IA3'") as error:
        await Resolving((bad,)).found("sql", backend(tmp_path))
    assert (error.value.status, error.value.param) == (400, "model")
    assert not await Resolving(()).found("sql", backend(tmp_path))
    assert not await Resolving((Counted(None),)).found("sql", backend(tmp_path))
