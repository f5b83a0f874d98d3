"""`meshlm bench sweep serve`: which combinations are run, with which commands, and what goes on after a break."""

import csv
import json
import shlex
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlm.supervisor.bench import sweep
from meshlm.supervisor.bench.sweep import Combination
from meshlm.supervisor.cli.main import run
from meshlm.supervisor.errors import UsageError

SERVER = """
import http.server, pathlib, sys
log = pathlib.Path(sys.argv[1])
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        with log.open("a") as out:
            out.write(self.command + " " + self.path + "\\n") if self.command == "POST" else None
        self.send_response(200)
        self.end_headers()
    do_GET = do_POST = answer
    def log_message(self, *_):
        pass
with log.open("a") as out:
    out.write("serve " + " ".join(sys.argv[4:]) + "\\n")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[3])), Handler).serve_forever()
"""
BENCH = """
import json, pathlib, sys
words = sys.argv[2:]
log = pathlib.Path(sys.argv[1])
given = dict(zip(words, words[1:]))
file = pathlib.Path(given["--result-dir"]) / given["--result-filename"]
with log.open("a") as out:
    out.write("bench " + given.get("--rate", "") + "\\n")
if pathlib.Path("broken").exists() and given.get("--rate") == "2":
    file.write_text('{"through')
    sys.exit(3)
file.write_text(json.dumps({"throughput": 10.5, "itls": [1, 2]}))
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A sweep of two servers and two rates."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("server.py", SERVER), ("bench.py", BENCH)):
        (tmp_path / name).write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "serve.json").write_text(json.dumps([{"max_num_seqs": 4}, {"max_num_seqs": 8}]))
    (tmp_path / "bench.json").write_text(json.dumps({"slow": {"rate": 1}, "fast": {"rate": 2}}))
    python = shlex.quote(sys.executable)
    return [
        *("bench", "sweep", "serve", "--serve-cmd", f"{python} server.py log --port {port}"),
        *("--bench-cmd", f"{python} bench.py log --rate 9", "--serve-params", "serve.json"),
        *("--bench-params", "bench.json", "--num-runs", "2", "-e", "mine"),
    ]


def test_every_combination_is_measured_and_summed_up(words: list[str], tmp_path: Path) -> None:
    assert run(words) == 0
    each = ["bench 1", "POST /reset_prefix_cache"] * 2 + ["bench 2", "POST /reset_prefix_cache"] * 2
    done = (tmp_path / "log").read_text().splitlines()
    assert done == ["serve --max-num-seqs 4", *each, "serve --max-num-seqs 8", *each]
    folder = tmp_path / "results" / "mine"
    lines = json.loads((folder / "summary.json").read_text())
    assert len(lines) == 8
    assert lines[0] == {
        "throughput": 10.5,
        "max_num_seqs": 4,
        "rate": 1,
        "_benchmark_name": "max_num_seqs=4--slow",
        "run_number": 0,
    }
    with (folder / "summary.csv").open() as file:
        assert [row["throughput"] for row in csv.DictReader(file)] == ["10.5"] * 8


def test_what_was_broken_off_goes_on(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that failed has no result; those that ended well are not run again, and neither is a server without need."""
    (tmp_path / "broken").write_text("")
    assert run(words) == 1
    assert "ended with 3" in capsys.readouterr().err
    assert run(words) == 2  # the folder is there
    assert "--resume goes on" in capsys.readouterr().err
    (tmp_path / "broken").unlink()
    (tmp_path / "log").unlink()
    assert run([*words, "--resume"]) == 0
    done = [line for line in (tmp_path / "log").read_text().splitlines() if not line.startswith("POST")]
    assert done == [
        "serve --max-num-seqs 4",
        *["bench 2"] * 2,
        "serve --max-num-seqs 8",
        *["bench 1", "bench 1"],
        *["bench 2"] * 2,
    ]
    (tmp_path / "log").unlink()
    assert run([*words, "--resume"]) == 0
    assert not (tmp_path / "log").exists()


def test_a_dry_run_prints_the_commands(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 + 8
    assert out[0].endswith("--max-num-seqs 4")
    assert "--rate 1 --save-result --result-dir results/mine/max_num_seqs=4--slow" in out[1]
    assert not (tmp_path / "results").exists()


def test_a_server_that_ends_is_said(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words[words.index("--serve-cmd") + 1] = f"{shlex.quote(sys.executable)} -c 1 --port 9"
    assert run(words) == 1
    assert "the server ended with 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--num-runs", "0"], "--num-runs 0: at least 1"),
        (["--link-vars", "a"], "--link-vars a: SERVE_PARAMETER=BENCH_PARAMETER"),
        (["--link-vars", "max_num_seqs=rate"], "no combination is left"),
        (["--serve-params", "nowhere.json"], "--serve-params nowhere.json: No such file"),
        (["--serve-params", "bad.json"], "--serve-params bad.json: a list of objects"),
        (["--bench-params", "twice.json"], "is there twice"),
        (["--bench-params", "flat.json"], "rate is no object"),
        (["--serve-cmd", "'"], "--serve-cmd ': No closing quotation"),
        (["--serve-cmd", "x --port y"], "--port y is no port"),
    ],
)
def test_bad_input_is_one_line(
    changed: list[str], said: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text("[1]")
    (tmp_path / "flat.json").write_text('{"rate": 1}')
    (tmp_path / "twice.json").write_text('[{"_benchmark_name": "a"}, {"_benchmark_name": "a"}]')
    assert run([*words, *changed]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_flags_take_the_place_of_the_commands_own() -> None:
    command = [
        "meshlm",
        "serve",
        "m",
        "--max_num_seqs=4",
        "--sizes",
        "1",
        "2",
        "--enable-prefix-caching",
        "--seed",
        "-1",
    ]
    params = {"max_num_seqs": 8, "sizes": 3, "enable_prefix_caching": False, "config": {"a": 1}, "_benchmark_name": "x"}
    assert sweep.with_params(command, params) == [
        *("meshlm", "serve", "m", "--seed", "-1", "--max-num-seqs", "8", "--sizes", "3", "--no-enable-prefix-caching"),
        *("--config", '{"a": 1}'),
    ]
    assert sweep.with_params(command, {"seed": 5})[-2:] == ["--seed", "5"]
    assert sweep.with_params(command, {"seed": None}) == command[:-2]


def test_linked_parameters_are_equal() -> None:
    serve: list[sweep.Params] = [{"s": 1}, {"s": 2}, {}]
    bench: list[sweep.Params] = [{"b": 1}, {"b": 2}, {"c": 1}]
    found = sweep.combinations(serve, bench, sweep.read_links("s=b"))
    assert found == [({"s": n}, [Combination({"s": n}, {"b": n})]) for n in (1, 2)]
    assert sum(len(each) for _, each in sweep.combinations(serve, bench, [])) == 9


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.booleans()), st.dictionaries(st.text(), st.text()))
def test_folders_are_names(serve: dict[str, object], bench: dict[str, object]) -> None:
    name = Combination(serve, bench).folder()
    assert 0 < len(name) <= 200
    assert "/" not in name
    assert name not in (".", "..")
    if serve != bench:
        assert name != Combination(bench, serve).folder() or sweep.shown(serve) == sweep.shown(bench)


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("meshlm serve m", ("127.0.0.1", 8000)),
        ("x --host=0.0.0.0 --port=81", ("127.0.0.1", 81)),
        ("x --host h --port 5 --port 6", ("h", 6)),
    ],
)
def test_where_the_server_is(command: str, found: tuple[str, int]) -> None:
    assert sweep.address(command.split()) == found


def test_links_of_nothing() -> None:
    assert sweep.read_links("") == []
    with pytest.raises(UsageError):
        sweep.read_links("=b")
