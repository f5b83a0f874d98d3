"""The environment of child processes."""

import pytest

from meshlm.protocol.ids import Role
from meshlm.supervisor.children import environment


def test_threads_of_a_worker_spin_for_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert environment(Role.WORKER)["GOMP_SPINCOUNT"] == "2000"
    assert "GOMP_SPINCOUNT" not in environment(Role.FRONTEND)


@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "77")])
def test_the_users_choice_stands(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    found = environment(Role.WORKER)
    assert found[name] == value
    assert len({"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & found.keys()) == 1


def test_no_process_gets_the_key_and_none_sees_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHLM_API_KEY", "secret")
    for role in Role:
        found = environment(role)
        assert "MESHLM_API_KEY" not in found
        assert found["PYTHONSAFEPATH"] == "1"
