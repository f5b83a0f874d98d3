"""The Python API: the same engine, no HTTP, no `__main__` guard."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mesh

SCRIPT = """
from meshlm import LLM, SamplingParams
llm = LLM(device="fake", max_model_len=512)
prompts = [[300, 301, 302], [400, 401]]
one, two = llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True, n=2))
from meshlm.workers.fake import expected_token
tokens = [300, 301, 302]
for _ in range(6):
    tokens.append(expected_token(tokens, llm.vocab_size))
assert one.outputs[0].token_ids == tokens[3:], one
assert one.outputs[1].token_ids == tokens[3:]
assert one.finished and one.outputs[0].finish_reason == "length"
assert two.prompt_token_ids == [400, 401]
(chat,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=3))
assert len(chat.outputs[0].token_ids) == 3 and chat.prompt.endswith("assistant\\n")
try:
    llm.generate([[1] * 600])
except ValueError as error:
    assert "maximum context length is 512" in str(error)
else:
    raise AssertionError("too long a prompt was taken")
print("done")
"""


def test_a_plain_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, "-P", str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")
