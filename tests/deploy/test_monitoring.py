"""Dashboards and alerts ask for metrics and labels that docs/metrics.md lists, in PromQL that Prometheus takes."""

import http.server
import json
import re
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import prometheus
import promql_parser as promql
import pytest
from files import DEPLOY, PORT, yaml

MONITORING = DEPLOY / "monitoring"
ROOT = DEPLOY.parent
GRAFANA, PERSES, ALERTS = (
    MONITORING / name for name in ("grafana-dashboard.json", "perses-dashboard.json", "alerts.yml")
)
WHOLE_MESH = ROOT / "tests" / "frontend" / "support" / "whole_mesh.py"
HISTOGRAM = ("_bucket", "_sum", "_count")
LIMIT_S = 30.0


def documented() -> dict[str, tuple[str, set[str]]]:
    """Type and labels by name."""
    rows = [line.split("|") for line in (ROOT / "docs" / "metrics.md").read_text().splitlines()]
    return {
        f"meshlm:{row[1].strip(' `')}": (row[2].strip(), set(re.findall(r"`(\w+)`", row[3])))
        for row in rows
        if len(row) == 6 and row[1].startswith(" `")
    }


def grafana() -> list[str]:
    panels = json.loads(GRAFANA.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def perses() -> list[str]:
    panels = json.loads(PERSES.read_text())["spec"]["panels"].values()
    return [one["spec"]["plugin"]["spec"]["query"] for panel in panels for one in panel["spec"]["queries"]]


def alerts() -> list[str]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule["expr"] for rule in group["rules"]]


def plain(query: str) -> str:
    """Without the dashboard's variables."""
    return query.replace("$__rate_interval", "1m").replace("$model", "m")


QUERIES = sorted({plain(query) for query in (*grafana(), *perses(), *alerts())})


class Selectors:
    """What a query reads, and the labels that it groups by."""

    def __init__(self, query: str) -> None:
        self.found: list[Any] = []
        self.grouped: set[str] = set()
        self._walk(promql.parse(query))

    def _walk(self, node: Any) -> None:
        match node:
            case promql.VectorSelector():
                self.found.append(node)
            case promql.MatrixSelector():
                self._walk(node.vector_selector)
            case promql.AggregateExpr():
                if node.modifier is not None:
                    self.grouped |= set(node.modifier.labels)
                self._walk(node.expr)
            case promql.Call():
                for argument in node.args:
                    self._walk(argument)
            case promql.BinaryExpr():
                self._walk(node.lhs)
                self._walk(node.rhs)
            case promql.ParenExpr() | promql.UnaryExpr():
                self._walk(node.expr)
            case promql.NumberLiteral() | promql.StringLiteral():
                pass
            case _:
                raise AssertionError(f"{type(node)} is not looked into")


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_reads_what_the_list_has(query: str) -> None:
    known, selectors = documented(), Selectors(query)
    assert selectors.found
    for selector in selectors.found:
        if selector.name == "up":
            continue
        ends = next((end for end in HISTOGRAM if selector.name.endswith(end) and selector.name not in known), "")
        kind, labels = known[selector.name.removesuffix(ends)]
        assert (kind == "histogram") == bool(ends), selector.name
        labels = labels | ({"le"} if ends == "_bucket" else set())
        used = {matcher.name for matcher in selector.matchers.matchers} | selectors.grouped
        assert used <= labels, f"{selector.name} has no label {used - labels}"


def test_both_dashboards_ask_the_same() -> None:
    assert grafana() == perses()
    assert len(grafana()) > 40


def test_the_files_are_what_their_list_says() -> None:
    made = runpy.run_path(str(MONITORING / "make_dashboards.py"))["files"]()
    assert {path.name: text for path, text in made.items()} == {p.name: p.read_text() for p in (GRAFANA, PERSES)}


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in json.loads(GRAFANA.read_text())["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_prometheus_asks_the_default_port() -> None:
    (job,) = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"localhost:{PORT}"]}]


# --- with Prometheus itself ---


@pytest.fixture(scope="module")
def binaries() -> Path:
    try:
        return prometheus.find()
    except prometheus.Absent as why:
        pytest.skip(str(why))


def test_promtool_takes_the_files_and_the_alerts_fire(binaries: Path) -> None:
    for command in (("check", "config", str(MONITORING / "prometheus.yml")), ("test", "rules", "alerts_test.yml")):
        folder = Path(__file__).parent / "support"
        done = subprocess.run(
            [binaries / "promtool", *command], cwd=folder, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def asked(binaries: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that has read the metrics of a whole mesh three times."""
    folder = tmp_path_factory.mktemp("prometheus")
    command = [sys.executable, "-P", str(WHOLE_MESH), str(folder), "2"]
    text = subprocess.run(command, capture_output=True, check=True, timeout=300).stdout

    class Mesh(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mesh)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    settings["rule_files"] = [str(ALERTS)]
    (job,) = settings["scrape_configs"]
    job |= {"scrape_interval": "200ms", "scrape_timeout": "200ms"}
    job["static_configs"] = [{"targets": [f"127.0.0.1:{server.server_port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    flags.append(f"--web.listen-address=127.0.0.1:{port}")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([binaries / "prometheus", *flags], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for_scrapes(url, process, folder / "log")
        yield url
    finally:
        process.kill()
        process.wait()
        server.shutdown()
        server.server_close()


def wait_for_scrapes(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/-/ready").is_success and ask(url, "count_over_time(up[1m]) >= 3 and up == 1"):
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def ask(url: str, query: str) -> list[Any]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", answer
    result: list[Any] = answer["data"]["result"]
    return result


def test_prometheus_answers_each_query_of_the_dashboards(asked: str) -> None:
    for query in sorted({*map(plain, grafana())}):
        assert ask(asked, query), f"no data: {query}"


def test_prometheus_knows_each_metric_by_its_type(asked: str) -> None:
    metadata = httpx.get(f"{asked}/api/v1/metadata").json()["data"]
    for name, (kind, _) in documented().items():
        assert metadata[name][0]["type"] == kind, name


def test_prometheus_has_loaded_the_alerts(asked: str) -> None:
    (group,) = httpx.get(f"{asked}/api/v1/rules").json()["data"]["groups"]
    assert len(group["rules"]) == len(alerts())
    assert {rule["type"] for rule in group["rules"]} == {"alerting"}
