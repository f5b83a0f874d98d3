"""The life of a process, in one of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from meshlm.protocol.config import MeshConfig, RunConfig
from meshlm.protocol.wire.ids import Role
from meshlm.supervisor.processes.children import config_file

LIMIT_S = 30
BUSY = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from meshlm.protocol.wire.ids import Role
from meshlm.runtime.process import process

class App:
    async def start(self, mesh):
        self.threads = ThreadPoolExecutor(1)
        self.threads.submit(time.sleep, 600)
        mesh.call_later(0.0, lambda: print("started", flush=True))
        return {}

    def on_peer_up(self, peer, incarnation): ...
    def on_peer_down(self, peer, incarnation, reason): ...
    def flush(self): ...
    def beat(self):
        return 0, ""

    def num_requests(self):
        return 0

    async def drain(self, limit_s):
        print("drained", flush=True)

    async def stop(self):
        self.threads.shutdown(wait=False, cancel_futures=True)
        print("stopped")

process.main(Role.DETOKENIZER, App, sys.argv[1:])
"""


def test_a_thread_that_works_does_not_hold_the_end(tmp_path: Path) -> None:
    config = config_file(MeshConfig(run=RunConfig(run_dir=str(tmp_path))), Role.DETOKENIZER)
    command = [sys.executable, "-P", "-c", BUSY, "--config-fd", str(config)]
    command += ["--identity", "detokenizer/0", "--incarnation", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[config]) as busy:
        os.close(config)
        try:
            assert busy.stdout is not None
            assert busy.stdout.readline() == "started\n"
            busy.send_signal(signal.SIGTERM)
            assert busy.stdout.readline() == "drained\n"
            assert busy.wait(LIMIT_S) == 0
            assert busy.stdout.read() == "stopped\n", "what was written last is not lost"
        finally:
            busy.kill()
