"""examples/plugin has one plug-in of each group, and each is what its group takes; tests/mesh/test_plugin.py runs them in meshes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from example_plugin import install

from meshlm.runtime import plugins

EACH = """
import json, os
from meshlm.architectures import quantization, registry
from meshlm.frontend.observe.stat_loggers import StatLoggers
from meshlm.protocol.config import AdapterConfig, MeshConfig, ServerConfig
from meshlm.runtime import adapter_resolvers, io_processors, logits_processors, platforms, plugins
from meshlm.runtime.parsers import registry as parsers
from meshlm.workers.attention import backend
from meshlm.workers.kv.connector_thread import maker_of
from meshlm.workers.speculative import drafters
from meshlm.frontend import endpoints
found = {group: plugins.names(group, os.environ) for group in plugins.GROUPS}
plugins.run_general(os.environ)
plugins.load_descriptions(os.environ)
plugins.load(plugins.BACKENDS, os.environ, backend.register)
parsers.load(os.environ, "", "")
loggers = StatLoggers(None)
loggers.load(MeshConfig(), 0, os.environ)
processor = io_processors.make("tiny_nearest", MeshConfig(), os.environ)
connector = maker_of("tiny_folder")(b"n" * 16, 4, {"folder": os.environ["MESHLM_TINY_NOTES"] + ".kv"})
print(json.dumps({
    "found": found,
    "family": "TinyForCausalLM" in registry.families(),
    "quantization": quantization.formats()["tiny_scaled"].read(
        {"quant_method": "tiny_scaled", "activation_scheme": "dynamic"}
    ).method,
    "backend": backend.BACKENDS["tiny_attention"]().name,
    "calls": "<function=" in parsers.tool_parser("tiny_calls").tags or bool(parsers.tool_parser("tiny_calls").finder({})),
    "reasoning": parsers.reasoning_parser("tiny_thoughts").open,
    "loggers": bool(loggers),
    "platform": [platforms.named("tiny").kv_cache_bytes(), callable(platforms.engine_of(platforms.named("tiny")))],
    "processors": [kind.__name__ for kind in logits_processors.loaded(logits_processors.names((), os.environ))],
    "adapters": [type(one).__name__ for one in adapter_resolvers.make(
        MeshConfig(adapters=AdapterConfig(enable_lora=True, allow_runtime_lora_updating=True)), os.environ)],
    "connector": list(connector.find([b"k" * 32], {})),
    "drafter": drafters._of_plugin("tiny_echo").__name__,
    "endpoints": [one.route.path for one in endpoints.load(MeshConfig(), {}, os.environ)][:2],
    "prompts": io_processors.prompts_of(processor, {"question": "a", "texts": ["b"]}, ""),
}))
"""


def test_one_of_each(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(install(tmp_path)), "MESHLM_TINY_NOTES": str(notes)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", EACH], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert all(len(names) == 1 for names in said.pop("found").values()), "one of each group"
    assert said == {
        "family": True,
        "quantization": "tiny_scaled",
        "backend": "tiny_attention",
        "calls": True,
        "reasoning": "<tiny>",
        "loggers": True,
        "platform": [64 << 20, True],
        "processors": ["TargetToken"],
        "adapters": ["TinyAdapters"],
        "connector": [False],
        "drafter": "Echo",
        "endpoints": ["/health/", "/get_world_size/"],
        "prompts": ["a", "b"],
    }
    assert len(list(notes.iterdir())) == 1


def test_the_document_has_every_group() -> None:
    text = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text("utf-8")
    assert [group for group in plugins.GROUPS if f"`{group}`" not in text] == []


@pytest.mark.parametrize("group", plugins.GROUPS)
def test_groups_have_names_of_ours(group: str) -> None:
    assert group.startswith("meshlm.")
