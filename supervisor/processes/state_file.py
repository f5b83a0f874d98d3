"""The state file of a run directory: what a supervisor leaves to the one that follows it (group/succession.py).

It is written by the supervisor alone, whole and at once, and removed in good order: where it is, and some of its processes run, their
supervisor died. It holds no key of the API: those who have them can tell by `fits` whether they are the same.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig
from meshlm.supervisor.group.succession import MeshState
from meshlm.supervisor.processes import proc_stat

FILE = "supervisor.state.json"  # rundir.py removes what ends so
ROUNDS = 10_000  # of the hash of the keys, which people may have chosen: some ms, once, when the mesh is ready
_encode = msgspec.json.Encoder().encode


class _Process(Struct, frozen=True):
    pid: int = 0
    start_ticks: int = 0


class Outline(Struct, frozen=True):
    """What any version of MeshLM can read of the file."""

    digest: str
    version: str
    places: tuple[_Process, ...] = ()

    @property
    def alive(self) -> list[int]:
        """Those of its processes that run."""
        return [one.pid for one in self.places if proc_stat.runs(one.pid, one.start_ticks)]


def without_keys(config: MeshConfig) -> MeshConfig:
    return replace(config, server=replace(config.server, api_key=(), admin_api_key=()))


def with_keys_of(config: MeshConfig, other: MeshConfig) -> MeshConfig:
    server, keys = config.server, other.server
    return replace(config, server=replace(server, api_key=keys.api_key, admin_api_key=keys.admin_api_key))


def digest_of_keys(config: MeshConfig, salt: str = "") -> str:
    """The digest of the API's keys, with a salt in front."""
    salt = salt or secrets.token_hex(16)
    keys = _encode([config.server.api_key, config.server.admin_api_key])
    return f"{salt}:{hashlib.pbkdf2_hmac('sha256', keys, salt.encode(), ROUNDS).hex()}"


def has_keys(state: MeshState, config: MeshConfig) -> bool:
    """Whether the keys of this configuration are the mesh's."""
    return hmac.compare_digest(digest_of_keys(config, state.keys.partition(":")[0]), state.keys)


def write(run_dir: Path, state: MeshState) -> None:
    """The file is the one before or this one, whenever this process dies."""
    new = run_dir / f"{FILE}.new.json"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(_encode(state))
    new.replace(run_dir / FILE)


def remove(run_dir: Path) -> None:
    with contextlib.suppress(OSError):
        (run_dir / FILE).unlink()


def read(run_dir: Path) -> MeshState | None:
    """None where there is none that this version can read."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode((run_dir / FILE).read_bytes(), type=MeshState)
    return None


def outline(run_dir: Path) -> Outline | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode((run_dir / FILE).read_bytes(), type=Outline)
    return None


def has_orphans(run_dir: Path) -> bool:
    """Whether processes of a mesh run there, with a supervisor or without one."""
    found = outline(run_dir)
    return found is not None and bool(found.alive)
