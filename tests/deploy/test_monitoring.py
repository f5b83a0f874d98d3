"""The dashboard asks for metrics that exist."""

import json
import re
import subprocess
import sys

from files import DEPLOY, PORT, yaml

DASHBOARD = DEPLOY / "monitoring" / "grafana-dashboard.json"
NAMES = """
from prometheus_client import REGISTRY
from meshlm.frontend.metrics import Metrics
Metrics("m", 4096)
print(*(sample.name for metric in REGISTRY.collect() for sample in metric.samples))
print(*(metric.name for metric in REGISTRY.collect()))
"""


def test_the_dashboard_s_metrics_exist() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    asked = {name for panel in dashboard["panels"] for at in panel["targets"] for name in names(at["expr"])}
    assert len(asked) > 15
    done = subprocess.run([sys.executable, "-P", "-c", NAMES], capture_output=True, text=True, check=True, timeout=60)
    known = set(done.stdout.split())
    # A counter or gauge with labels has no sample before its first value: then its name must do.
    assert {name for name in asked if name not in known and name.removesuffix("_total") not in known} == set()


def names(expression: str) -> list[str]:
    return re.findall(r"meshlm:[a-z0-9_]+", expression)


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_prometheus_asks_the_default_port() -> None:
    (job,) = yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"localhost:{PORT}"]}]
