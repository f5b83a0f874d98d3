"""aiperf, NVIDIA's load generator: streamed chats by its own client, counted by the server, and its reading of /metrics.

It has an environment of its own (requirements-aiperf.txt). It wants a folder with a tokenizer (TOKENIZER) to make its
prompts: any will do, since tokens are counted by the server.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

NUM_REQUESTS, NUM_TOKENS, CONCURRENCY = 8, 8, 4


def profile(url: str, model: str, tokenizer: str, folder: Path) -> None:
    command = [
        str(Path(sys.executable).parent / "aiperf"),
        *("profile", "-m", model, "--url", url, "--endpoint-type", "chat", "--streaming", "--ui", "none"),
        *("--tokenizer", tokenizer, "--use-server-token-count", "--isl", "20", "--osl", str(NUM_TOKENS)),
        *("--request-count", str(NUM_REQUESTS), "--concurrency", str(CONCURRENCY), "--artifact-dir", str(folder)),
        *("--extra-inputs", "ignore_eos:true"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HOME": str(folder / "hf")})
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    profile(sys.argv[1].removesuffix("/v1"), sys.argv[2], os.environ["TOKENIZER"], folder)
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    assert found["is_complete"], found
    assert not found["error_summary"], found["error_summary"]
    assert found["request_count"]["avg"] == NUM_REQUESTS, found["request_count"]
    tokens = found["usage_completion_tokens"]
    assert tokens["min"] == tokens["max"] == NUM_TOKENS, tokens
    assert 0 < found["time_to_first_token"]["min"] < found["request_latency"]["max"], found["time_to_first_token"]
    assert found["inter_token_latency"]["avg"] > 0, found["inter_token_latency"]
    metrics = json.loads((folder / "server_metrics_export.json").read_text())["metrics"]
    assert {"meshlm:generation_tokens", "meshlm:time_to_first_token_seconds"} <= metrics.keys(), sorted(metrics)
