"""Parsers that are not there end the start with one line."""

import json
from pathlib import Path

import pytest
import tokenizers

from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, resolve


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"tool_call_parser": "nobody"}, "--tool-call-parser nobody: there are .*deepseek_v3"),
        ({"reasoning_parser": "nobody"}, "--reasoning-parser nobody: there are .*deepseek_r1"),
        ({"tool_parser_plugin": "missing.py"}, "--tool-parser-plugin missing.py: FileNotFoundError"),
        ({"reasoning_parser_plugin": "missing"}, "--reasoning-parser-plugin missing: ValueError: it is no Python file"),
    ],
)
def test_what_is_not_there_is_refused(smollm2: Path, more: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=f"^{text}"):
        resolve.resolve(flags.build({"model": str(smollm2), "device": "fake", **more}, None))


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 2,
    "experts_per_token": 1,
    "initial_context_length": 4096,
    "swiglu_limit": 7.0,
    "eos_token_id": 5,
}


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    """A folder with a tokenizer, for --load-format dummy."""
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7, 9]}))
    vocabulary = {chr(33 + n): n for n in range(90)}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    "given",
    [{}, {"tool_call_parser": "openai", "enable_auto_tool_choice": True}, {"reasoning_parser": "openai_gptoss"}],
)
def test_gpt_oss_speaks_harmony(gpt_oss: Path, given: dict[str, object]) -> None:
    """And its texts end with any of the tokens that its file names."""
    values = {"model": str(gpt_oss), "device": "fake", "load_format": "dummy", **given}
    config = resolve.resolve(flags.build(values, None))
    server = config.server
    assert (server.tool_call_parser, server.reasoning_parser) == ("openai", "openai_gptoss")
    assert server.enable_auto_tool_choice
    assert config.resolved is not None
    assert set(config.resolved.eos_token_ids) >= {2, 7, 9}


def test_another_parser_stays_and_one_that_does_not_go_with_harmony_is_refused(gpt_oss: Path, smollm2: Path) -> None:
    values = {"model": str(gpt_oss), "device": "fake", "load_format": "dummy"}
    server = resolve.resolve(flags.build({**values, "reasoning_parser": "qwen3"}, None)).server
    assert (server.tool_call_parser, server.reasoning_parser) == ("", "qwen3")
    with pytest.raises(UsageError, match="--tool-call-parser openai with --reasoning-parser none"):
        resolve.resolve(flags.build({"model": str(smollm2), "device": "fake", "tool_call_parser": "openai"}, None))
