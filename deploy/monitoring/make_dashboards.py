"""Writes the Grafana and the Perses dashboard from one list of panels: `python -P deploy/monitoring/make_dashboards.py`."""

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
M = '{model_name="$model"}'
WIDE, WIDTH, HEIGHT = 24, 8, 7
PERSES_UNITS = {"s": "seconds", "percentunit": "percent-decimal", "reqps": "requests/sec", "ops": "ops/sec"}


class Panel(NamedTuple):
    """A chart. queries: PromQL with the legend of its lines; WINDOW stands for the dashboard's rate interval."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    text: str = ""


def rate(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate(meshlm:{name}{M}[WINDOW]))"


def quantile(share: float, name: str, by: str = "le") -> str:
    return f"histogram_quantile({share}, sum by ({by}) (rate(meshlm:{name}_bucket{M}[WINDOW])))"


def times(title: str, name: str, text: str = "") -> Panel:
    return Panel(title, "s", tuple((quantile(share, name), f"p{share * 100:g}") for share in (0.5, 0.99)), text)


def mean(name: str) -> str:
    return f"{rate(f'{name}_sum')} / {rate(f'{name}_count')}"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Work": (
        Panel(
            "Tokens",
            "short",
            ((rate("generation_tokens_total"), "generated /s"), (rate("prompt_tokens_total"), "prompt /s")),
        ),
        Panel(
            "Requests",
            "short",
            tuple((f"sum(meshlm:num_requests_{state}{M})", state) for state in ("running", "waiting", "held")),
            "held: no rank serves. Waiting that grows: more is asked for than the mesh can do.",
        ),
        Panel("Ends", "reqps", ((rate("request_success_total", "finished_reason"), "{{finished_reason}}"),)),
    ),
    "Latency": (
        times("Time to first token", "time_to_first_token_seconds"),
        times("Time between tokens", "inter_token_latency_seconds"),
        times("Whole request", "e2e_request_latency_seconds"),
        Panel(
            "Where a request's time goes, mean",
            "s",
            tuple(
                (mean(f"request_{hop}_time_seconds"), hop) for hop in ("encode", "route", "queue", "prefill", "decode")
            ),
            "queue: waits for a place in the batch; prefill: computes its prompt.",
        ),
        Panel(
            "Where a step's time goes, mean",
            "s",
            tuple(
                (mean(f"step_{hop}_time_seconds"), hop)
                for hop in ("schedule", "send", "launch", "device", "return", "decode", "write")
            ),
            "device should be nearly all of it.",
        ),
        Panel("Tokens of a step, mean", "short", ((mean("iteration_tokens_total"), "tokens"),), "As vLLM names it."),
    ),
    "KV cache": (
        Panel("KV cache in use", "percentunit", ((f"meshlm:kv_cache_usage_perc{M}", "rank {{engine}}"),)),
        Panel("Pages by state", "short", ((f"sum by (state) (meshlm:kv_cache_blocks{M})", "{{state}}"),)),
        Panel(
            "Prompt tokens found in the prefix cache",
            "percentunit",
            ((f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}", "found"),),
        ),
        Panel(
            "Prompt tokens not found, by reason",
            "short",
            ((rate("prefix_cache_miss_tokens_total", "reason"), "{{reason}}"),),
            "evicted: the KV cache is too small for what comes back.",
        ),
        Panel(
            "Pages held, by group", "short", ((f"sum by (kv_group) (meshlm:kv_cache_group_blocks{M})", "{{kv_group}}"),)
        ),
        Panel(
            "Lifetime of pages",
            "s",
            (
                (quantile(0.5, "kv_block_lifetime_seconds"), "lifetime p50"),
                (quantile(0.5, "kv_block_idle_before_evict_seconds"), "idle before eviction p50"),
                (quantile(0.5, "kv_block_reuse_gap_seconds"), "between two uses p50"),
            ),
            "With --kv-cache-metrics.",
        ),
    ),
    "Why": (
        Panel("Refused requests", "reqps", ((rate("request_refusals_total", "reason"), "{{reason}}"),)),
        Panel("Retries", "reqps", ((rate("request_retries_total", "reason"), "{{reason}}"),), "Deaths of processes."),
        Panel("Preemptions", "ops", ((rate("num_preemptions_by_reason_total", "reason"), "{{reason}}"),)),
        times("Refused by their head, after", "request_refusal_seconds"),
        Panel("Balance: running requests by rank", "short", ((f"meshlm:num_requests_running{M}", "rank {{engine}}"),)),
        Panel("Steps without a CUDA graph", "ops", ((rate("cudagraph_misses_total", "reason"), "{{reason}}"),)),
    ),
    "Device": (
        Panel(
            "Drafted tokens accepted",
            "percentunit",
            (
                (
                    f"{rate('spec_decode_num_accepted_tokens_total')} / {rate('spec_decode_num_draft_tokens_total')}",
                    "accepted",
                ),
            ),
            "With --speculative-config.",
        ),
        Panel(
            "Device waits for the host",
            "percentunit",
            (
                (
                    f"{rate('device_idle_seconds_total', 'engine')} / ({rate('device_idle_seconds_total', 'engine')} + "
                    f"{rate('device_busy_seconds_total', 'engine')})",
                    "rank {{engine}}",
                ),
            ),
        ),
        Panel(
            "Operations of one GPU, estimated",
            "short",
            ((rate("estimated_flops_per_gpu_total", "engine"), "rank {{engine}}"),),
            "With --enable-mfu-metrics; divided by the data sheet's figure it is the MFU.",
        ),
        Panel(
            "Memory traffic of one GPU, estimated",
            "Bps",
            (
                (
                    f"{rate('estimated_read_bytes_per_gpu_total', 'engine')} + "
                    f"{rate('estimated_write_bytes_per_gpu_total', 'engine')}",
                    "rank {{engine}}",
                ),
            ),
            "With --enable-mfu-metrics.",
        ),
    ),
}


def placed() -> list[tuple[str, Panel, dict[str, int]]]:
    """Each panel with its row and its place; a row has a heading of height 1."""
    found, y = [], 0
    for row, panels in ROWS.items():
        y += 1
        for number, panel in enumerate(panels):
            x, line = number * WIDTH % WIDE, number * WIDTH // WIDE
            found.append((row, panel, {"x": x, "y": y + line * HEIGHT, "w": WIDTH, "h": HEIGHT}))
        y += -(-len(panels) * WIDTH // WIDE) * HEIGHT
    return found


def grafana() -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels: list[dict[str, Any]] = []
    for row, panel, place in placed():
        if row not in [one["title"] for one in panels if one["type"] == "row"]:
            heading = {"x": 0, "y": place["y"] - 1, "w": WIDE, "h": 1}
            panels.append({"id": len(panels) + 1, "type": "row", "title": row, "gridPos": heading, "panels": []})
        targets = [
            {"expr": query.replace("WINDOW", "$__rate_interval"), "legendFormat": legend, "refId": "ABCDEFGH"[number]}
            for number, (query, legend) in enumerate(panel.queries)
        ]
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "timeseries",
                "title": panel.title,
                "description": panel.text,
                "datasource": source,
                "gridPos": place,
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
                "targets": targets,
            }
        )
    model = {
        "name": "model",
        "type": "query",
        "label": "Model",
        "datasource": source,
        "query": "label_values(meshlm:prompt_tokens_total, model_name)",
        "refresh": 2,
    }
    data_source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "title": "MeshLM",
        "uid": "meshlm",
        "tags": ["meshlm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [data_source, model]},
        "panels": panels,
    }


def perses() -> dict[str, Any]:
    panels, layouts = {}, []
    for row in ROWS:
        items = []
        places = [(panel, place) for of_row, panel, place in placed() if of_row == row]
        for panel, place in places:
            name = panel.title.lower().replace(" ", "-").replace(",", "").replace(":", "").replace("'", "")
            plugin = {"legend": {"position": "bottom"}, "yAxis": {"min": 0}}
            if panel.unit in PERSES_UNITS:
                plugin["yAxis"] = {"min": 0, "format": {"unit": PERSES_UNITS[panel.unit]}}
            queries = [
                {
                    "kind": "TimeSeriesQuery",
                    "spec": {
                        "plugin": {
                            "kind": "PrometheusTimeSeriesQuery",
                            "spec": {"query": query.replace("WINDOW", "$__rate_interval"), "seriesNameFormat": legend},
                        }
                    },
                }
                for query, legend in panel.queries
            ]
            panels[name] = {
                "kind": "Panel",
                "spec": {
                    "display": {"name": panel.title, "description": panel.text},
                    "plugin": {"kind": "TimeSeriesChart", "spec": plugin},
                    "queries": queries,
                },
            }
            at = {"x": place["x"], "y": place["y"] - places[0][1]["y"], "width": place["w"], "height": place["h"]}
            items.append({**at, "content": {"$ref": f"#/spec/panels/{name}"}})
        layouts.append(
            {"kind": "Grid", "spec": {"display": {"title": row, "collapse": {"open": True}}, "items": items}}
        )
    labels = {"labelName": "model_name", "matchers": ["meshlm:prompt_tokens_total"]}
    variable = {
        "kind": "ListVariable",
        "spec": {
            "name": "model",
            "display": {"name": "Model"},
            "allowAllValue": False,
            "allowMultiple": False,
            "plugin": {"kind": "PrometheusLabelValuesVariable", "spec": labels},
        },
    }
    return {
        "kind": "Dashboard",
        "metadata": {"name": "meshlm", "project": "meshlm"},
        "spec": {
            "display": {"name": "MeshLM"},
            "duration": "30m",
            "refreshInterval": "10s",
            "variables": [variable],
            "panels": panels,
            "layouts": layouts,
        },
    }


def files() -> dict[Path, str]:
    made = {"grafana-dashboard.json": grafana(), "perses-dashboard.json": perses()}
    return {FOLDER / name: json.dumps(dashboard, indent=1) + "\n" for name, dashboard in made.items()}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, "utf-8")
        print(path)
