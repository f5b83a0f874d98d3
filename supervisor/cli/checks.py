"""What processes would refuse at their start, for `meshlm serve --dry-run`: each kind is asked by a process that ends with its answer.

Called by serve.py. The modules that answer are detokenizer/check.py, workers/check.py and frontend/check.py.
"""

import json
import os
import subprocess
import sys

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.ids import Role
from meshlm.supervisor.errors import StartError
from meshlm.supervisor.processes.children import config_file, variables_of
from meshlm.supervisor.settings import placement

MODULES = {
    Role.DETOKENIZER: "meshlm.detokenizer.check",
    Role.WORKER: "meshlm.workers.check",
    Role.FRONTEND: "meshlm.frontend.check",
}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # what is asked for needs none


def check(config: MeshConfig) -> None:
    """Of a resolved configuration: StartError with the first refusal of a process of this node."""
    roles = {identity.role for identity in placement.identities(config)}
    if not config.server.io_processor_plugin:  # all else that a frontend needs is the supervisor's to know
        roles.discard(Role.FRONTEND)
    asked = {role: _ask(role, config) for role in MODULES if role in roles}
    answers = {role: process.communicate(timeout=config.run.startup_timeout)[0] for role, process in asked.items()}
    for role, said in answers.items():
        if said.strip():
            raise StartError(f"{role.value}: {json.loads(said.splitlines()[-1])['error']}")
        if asked[role].returncode:
            raise StartError(f"{role.value}: the process that looks what it would refuse has failed")


def _ask(role: Role, config: MeshConfig) -> subprocess.Popen[bytes]:
    """A process with what one of this role gets: no key of the API."""
    descriptor = config_file(config, role)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", MODULES[role]],
            stdin=descriptor,
            stdout=subprocess.PIPE,
            env={**variables_of(role, config, os.environ, {}), **NO_GPU},
        )
    finally:
        os.close(descriptor)
