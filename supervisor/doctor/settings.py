"""Checks of what a mesh would be started with: its port, run directory, keys, caches and model."""

import os
import shutil
from pathlib import Path

from meshlm.protocol.config import MeshConfig
from meshlm.runtime.api_keys import KeyFileError, read_file
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.mesh import keys
from meshlm.runtime.model_files import model_files
from meshlm.supervisor.doctor.findings import Finding, failed, ok, warning
from meshlm.supervisor.errors import StartError
from meshlm.supervisor.processes import children, rundir
from meshlm.supervisor.settings import resolve

FREE_NEEDED = 10 << 30


def findings(config: MeshConfig) -> list[Finding]:
    found = [port(config), run_directory(config), api_keys(config)]
    if config.network.key_file:
        found.append(mesh_keys(config.network.key_file))
    found += [cache(variable) for variable in children.USUAL]
    found += [downloads(), model(config)]
    return found


def port(config: MeshConfig) -> Finding:
    server = config.server
    try:
        resolve.claim_port(server.address, server.port).close()
    except StartError as error:
        advice = "another program has it (ss -ltnp names it; `meshlm status` lists your meshes): --port"
        return failed("port", str(error), advice)
    return ok("port", f"{server.address}:{server.port} is free")


def run_directory(config: MeshConfig) -> Finding:
    wanted = Path(config.run.run_dir) if config.run.run_dir else rundir.base_dir(os.environ)
    try:
        if wanted.exists():
            rundir.check_private(wanted)
        elif not os.access(next(above for above in wanted.absolute().parents if above.exists()), os.W_OK):
            return failed("run directory", f"{wanted} cannot be made", "give a place that you can write to: --run-dir")
    except StartError as error:
        return failed("run directory", str(error), "give a directory of yours with mode 0700: --run-dir")
    return ok("run directory", str(wanted))


def api_keys(config: MeshConfig) -> Finding:
    server = config.server
    if server.api_key_file:
        try:
            number = len(read_file(server.api_key_file))
            mode = Path(server.api_key_file).stat().st_mode
        except (KeyFileError, OSError) as error:
            return failed("api keys", str(error), "each line is a key, its scopes and limits: docs/security.md")
        if mode & 0o077:
            return warning("api keys", f"others can read {server.api_key_file}", f"chmod 600 {server.api_key_file}")
        return ok("api keys", f"{number} in {server.api_key_file}")
    if server.api_key:
        return ok("api keys", f"{len(server.api_key)} given")
    if server.is_local:
        return ok("api keys", "none: only this host is served")
    found = f"none, and whoever reaches {server.address} may use the server"
    return warning("api keys", found, "set MESHLM_API_KEY, or leave --host out")


def mesh_keys(path: str) -> Finding:
    try:
        keys.load(path)
    except keys.KeyFileError as error:
        return failed("mesh keys", str(error), "`meshlm keys FILE` makes a pair; every node has a copy with mode 0600")
    return ok("mesh keys", path)


def cache(variable: str) -> Finding:
    _, why = children.for_workers({"XDG_CACHE_HOME": "cpu", "TRITON_CACHE_DIR": "cuda"}[variable], os.environ)
    name = f"cache ({variable})"
    if why:
        return warning(name, why, f"set {variable} to a folder that keeps: each start compiles anew otherwise")
    return ok(name, os.environ.get(variable) or f"~/{children.USUAL[variable]}")


def downloads() -> Finding:
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    folder = Path(os.environ.get("HF_HOME") or usual).expanduser()
    there = next(above for above in (folder, *folder.absolute().parents) if above.exists())
    free = shutil.disk_usage(there).free
    found = f"{free >> 30} GiB free at {folder}"
    if not os.access(there, os.W_OK):
        return warning("downloads", f"{there} cannot be written", "set HF_HOME, or give models as folders")
    if free < FREE_NEEDED:
        return warning("downloads", found, "models of the hub are downloaded there; set HF_HOME to a larger disk")
    return ok("downloads", found)


def model(config: MeshConfig) -> Finding:
    """A folder or file is read as the start would read it, but for the weights; a name of the hub is left to the start."""
    wanted = config.model.model
    is_path = wanted.startswith((".", "/", "~")) or wanted.endswith(".gguf") or wanted.count("/") != 1
    if wanted and not is_path and not Path(wanted).exists():
        return ok("model", f"{wanted}, of the Hugging Face hub: it is fetched at the start")
    try:
        files = model_files.resolve_model(config.model)
    except ModelFilesError as error:
        return failed("model", str(error), "docs/models.md says which architectures and formats are served")
    return ok("model", f"{files.path} ({files.spec.architecture}, {files.load_format})")
