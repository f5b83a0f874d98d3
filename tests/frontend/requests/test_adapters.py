"""The list of adapters, as two frontends and a coordinator keep it: one of two changes at once is made anew on top of the other."""

import asyncio
from collections.abc import Callable

import pytest
from tiny_models import resolved_of, spec_of

from meshlm.coordinator.core import Coordinator
from meshlm.coordinator.frontends import Frontends
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.requests import adapters as module
from meshlm.frontend.requests.adapters import Adapters
from meshlm.protocol.adapters import Adapter, AdapterList
from meshlm.protocol.edges.control import Member
from meshlm.protocol.wire.ids import COORDINATOR, Identity, Incarnation, Role
from meshlm.runtime.errors import LinkDown

RESOLVED = resolved_of(spec_of(), adapters=(Adapter("old", "/old", b"o" * 32),))
BASE = RESOLVED.served_names[0]


def adapter(name: str, content: str = "") -> Adapter:
    return Adapter(name, f"/{name}", (content or name).encode() * 8)


class Mesh:
    """Frontends and a coordinator whose messages arrive in the next turn of the loop."""

    def __init__(self, num_frontends: int) -> None:
        self.frontends = {Identity(Role.FRONTEND, number): Adapters() for number in range(num_frontends)}
        for frontend in self.frontends.values():
            frontend.begin(RESOLVED)
        self.is_up = True
        self.restart()

    def restart(self) -> None:
        """Another coordinator, which knows nothing."""
        members = {identity: Member(identity, Incarnation(1), "ipc://x") for identity in self.frontends}
        core = Coordinator(1, 1)
        self.coordinator = Frontends(members, core.router, {}, {}, core.weights, 0)
        for identity, frontend in self.frontends.items():
            frontend.coordinator_up(self.sender(identity))

    def sender(self, identity: Identity) -> Callable[[AdapterList], None]:
        def send(message: AdapterList) -> None:
            if not self.is_up:
                raise LinkDown(COORDINATOR)
            asyncio.get_running_loop().call_soon(self._arrived, identity, message)

        return send

    def _arrived(self, identity: Identity, message: AdapterList) -> None:
        for send in self.coordinator.has_adapters(identity, message):
            assert isinstance(send.message, AdapterList)
            asyncio.get_running_loop().call_soon(self.frontends[send.to].heard, send.message)

    async def load(self, number: int, one: Adapter, *, in_place: bool = False) -> Adapter | None:
        identity = Identity(Role.FRONTEND, number)
        return await self.frontends[identity].load(one, self.sender(identity), in_place=in_place)

    async def unload(self, number: int, name: str) -> Adapter:
        identity = Identity(Role.FRONTEND, number)
        return await self.frontends[identity].unload(name, self.sender(identity))

    def names(self) -> set[tuple[str, ...]]:
        return {frontend.names for frontend in self.frontends.values()}


async def test_a_change_is_everybodys() -> None:
    mesh = Mesh(2)
    assert await mesh.load(0, adapter("a")) is None
    await asyncio.sleep(0)
    assert mesh.names() == {(BASE, "old", "a")}
    assert await mesh.load(1, adapter("a", "new"), in_place=True) == adapter("a")
    assert await mesh.unload(0, "old") == RESOLVED.adapters[0]
    await asyncio.sleep(0)
    assert mesh.names() == {(BASE, "a")}
    for frontend in mesh.frontends.values():
        assert frontend.find("a") == adapter("a", "new")
        assert frontend.has_digest(adapter("a", "new").digest)
        assert not frontend.has_digest(adapter("a").digest)


async def test_names_that_are_taken_or_nobodys() -> None:
    mesh = Mesh(1)
    with pytest.raises(HttpError, match=r"has already been loaded. Set 'load_inplace' to true") as error:
        await mesh.load(0, adapter("old"))
    assert error.value.status == 400
    with pytest.raises(HttpError, match="is the base model's name"):
        await mesh.load(0, adapter(BASE), in_place=True)
    with pytest.raises(HttpError, match="cannot be found") as error:
        await mesh.unload(0, "none")
    assert error.value.status == 404


async def test_two_changes_at_once_are_both_made() -> None:
    mesh = Mesh(3)
    await asyncio.gather(mesh.load(0, adapter("a")), mesh.load(1, adapter("b")), mesh.unload(2, "old"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert {frozenset(names) for names in mesh.names()} == {frozenset((BASE, "a", "b"))}


async def test_of_two_with_one_name_the_second_is_refused() -> None:
    mesh = Mesh(2)
    first, second = await asyncio.gather(
        mesh.load(0, adapter("a", "x")), mesh.load(1, adapter("a", "y")), return_exceptions=True
    )
    assert [isinstance(one, HttpError) for one in (first, second)].count(True) == 1
    await asyncio.sleep(0)
    assert mesh.names() == {(BASE, "old", "a")}


async def test_a_new_coordinator_hears_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    mesh = Mesh(2)
    await mesh.load(0, adapter("a"))
    await asyncio.sleep(0)
    mesh.is_up = False
    loading = asyncio.ensure_future(mesh.load(1, adapter("b")))
    await asyncio.sleep(0)
    mesh.is_up = True
    mesh.restart()
    await loading
    await asyncio.sleep(0)
    assert mesh.names() == {(BASE, "old", "a", "b")}


async def test_without_a_coordinator_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHANGED_S", 0.01)
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    mesh = Mesh(1)
    mesh.is_up = False
    with pytest.raises(HttpError, match="the coordinator does not take the list of adapters") as error:
        await mesh.load(0, adapter("a"))
    assert error.value.status == 503
    assert mesh.names() == {(BASE, "old")}
