"""The batch script, with stand-ins for what it starts."""

import argparse
import os
import re
import signal
import stat
import subprocess
import time
from pathlib import Path

from files import DEPLOY, needed_s, value_of

from meshlm.supervisor.settings import flags

SBATCH = DEPLOY / "slurm" / "meshlm.sbatch"


def test_sbatch_syntax() -> None:
    subprocess.run(["bash", "-n", str(SBATCH)], check=True, timeout=300)


def test_sbatch_has_time_to_drain() -> None:
    text = SBATCH.read_text()
    before = re.search(r"^#SBATCH --signal=B:TERM@(\d+)$", text, re.MULTILINE)
    assert before
    (line,) = (line for line in text.splitlines() if line.startswith("meshlm serve "))
    assert int(before[1]) > needed_s(line.split()) + 30  # and air for a slow node


def test_sbatch_passes_sigterm_on_and_waits(tmp_path: Path) -> None:
    """With a stand-in for meshlm that needs a moment to drain."""
    fake = tmp_path / "meshlm"
    fake.write_text(
        "#!/bin/bash\ntrap 'sleep 0.5; echo drained; exit 7' TERM\necho \"args $*\"\nwhile :; do sleep 0.05; done\n"
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    log = tmp_path / "log"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MESHLM_API_KEY": "k"}
    with log.open("w") as out:
        job = subprocess.Popen(["bash", str(SBATCH), "some/model"], env=environment, stdout=out, stderr=out)
        try:
            end = time.monotonic() + 30
            while "args serve" not in log.read_text():
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.05)
            job.send_signal(signal.SIGTERM)
            assert job.wait(30) == 7, log.read_text()
        finally:
            job.kill()
    text = log.read_text()
    assert "drained" in text
    assert "some/model" in text
    (run_dir,) = re.findall(r"--run-dir (\S+)", text)
    assert not Path(run_dir).exists()


def job(folder: Path, **slurm: str) -> dict[str, str]:
    """The environment of a job whose meshlm and srun are the stand-ins in the folder."""
    for name in ("meshlm", "srun"):
        (folder / name).chmod(0o700)
    known = {"MESHLM_API_KEY": "k", "MESHLM_ADDRESS": "10.0.0.1", "SLURM_SUBMIT_DIR": str(folder)}
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **known, **slurm}


def test_sbatch_starts_the_other_nodes_and_waits_for_them(tmp_path: Path) -> None:
    """With stand-ins for meshlm and srun: the nodes get the head's address, the key, their numbers and the user's flags."""
    (tmp_path / "meshlm").write_text(
        '#!/bin/bash\n[[ $1 == keys ]] && { umask 077; echo key > "$2"; exit; }\necho "started $*"\n'
        '[[ " $* " == *" --headless "* ]] && sleep 0.5\nexit 0\n'
    )
    (tmp_path / "srun").write_text(
        '#!/bin/bash\necho "srun $*"\nwhile [[ $1 == --* ]]; do shift; done\n'
        'for SLURM_PROCID in 0 1; do SLURM_PROCID=$SLURM_PROCID "$@" & done\nwait\necho "nodes ended"\n'
    )
    environment = job(tmp_path, SLURM_JOB_NUM_NODES="3", SLURM_JOB_ID="77", MESHLM_HEAD_FLAGS="--frontends 2")
    done = subprocess.run(
        ["bash", str(SBATCH), "some/model", "-dp", "3"],
        env=environment, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    started = [line.split() for line in done.stdout.splitlines() if line.startswith("started ")]
    (head,) = (words for words in started if "--headless" not in words)
    nodes = [words for words in started if "--headless" in words]
    assert [value_of(words, "--frontends") for words in (head, *nodes)] == ["2", None, None]
    assert value_of(head, "--listen") == "tcp://10.0.0.1:5600"
    assert sorted(str(value_of(words, "--node-rank")) for words in nodes) == ["1", "2"]
    for words in nodes:
        assert value_of(words, "--join") == value_of(head, "--listen")
        assert value_of(words, "--run-dir") == value_of(head, "--run-dir")
    for words in started:
        assert words[-3:] == ["some/model", "-dp", "3"]
        assert value_of(words, "--nnodes") == "3"
        assert value_of(words, "--key-file") == str(tmp_path / "meshlm-77.key")
        parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
        flags.add_flags(parser)
        flags.build(vars(parser.parse_args(words[2:])), None)
    (asked,) = (line for line in done.stdout.splitlines() if line.startswith("srun "))
    assert {"--nodes=2", "--ntasks=2", "--relative=1"} <= set(asked.split())
    assert "nodes ended" in done.stdout
    assert not (tmp_path / "meshlm-77.key").exists()


def test_a_head_that_fails_takes_the_other_nodes_with_it(tmp_path: Path) -> None:
    """They would wait for the next head, and the job would hold its nodes until its time is over."""
    (tmp_path / "meshlm").write_text(
        '#!/bin/bash\n[[ $1 == keys ]] && { umask 077; echo key > "$2"; exit; }\n'
        f"until [[ -e {tmp_path}/nodes ]]; do :; done\nexit 3\n"
    )
    (tmp_path / "srun").write_text(
        f"#!/bin/bash\ntrap 'echo \"nodes told\"; exit 143' TERM\ntouch {tmp_path}/nodes\n"
        "while :; do read -rt 0.05 <> <(:) || :; done\n"
    )
    environment = job(tmp_path, SLURM_JOB_NUM_NODES="2")
    done = subprocess.run(["bash", str(SBATCH), "m"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3, done.stderr
    assert "nodes told" in done.stdout


def test_sbatch_wants_a_key() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MESHLM_API_KEY"}
    done = subprocess.run(
        ["bash", str(SBATCH)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode != 0
    assert "MESHLM_API_KEY" in done.stderr
