"""Parsers that a file or a name brings; what is wrong with them is said in one line."""

from pathlib import Path

import pytest

from meshlm.runtime import plugins
from meshlm.runtime.parsers import registry
from meshlm.runtime.parsers.calls import Call, joined
from meshlm.runtime.parsers.reasoning import ReasoningParser
from meshlm.runtime.parsers.registry import ParserError

DOCS = Path(__file__).parents[3] / "docs" / "tool-calling.md"


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_loaded", set())
    plugins._installed.cache_clear()
    monkeypatch.setattr(registry, "_loaded_files", set())
    monkeypatch.setattr(registry, "TOOL_PARSERS", dict(registry.TOOL_PARSERS))
    monkeypatch.setattr(registry, "REASONING_PARSERS", dict(registry.REASONING_PARSERS))


def code_of_docs() -> tuple[str, str]:
    """The two examples of the page, as files."""
    page = DOCS.read_text().partition("## A parser of your own")[2]
    lines = [line.removeprefix("    ") if line.startswith("    ") else "#" for line in page.splitlines()]
    first, second = "\n".join(lines).rsplit("from meshlm.runtime.parsers.reasoning", 1)
    return first, "from meshlm.runtime.parsers.reasoning" + second


def test_the_files_of_the_documentation_work(tmp_path: Path) -> None:
    calls, thoughts = tmp_path / "calls.py", tmp_path / "thoughts.py"
    calls.write_text(code_of_docs()[0])
    thoughts.write_text(code_of_docs()[1])
    for _ in range(2):  # once in a process
        registry.load({}, str(calls), str(thoughts))
    finder = registry.tool_parser("mine").finder({})
    assert joined(finder.push('a<call>{"name": "f", "arguments": {}}</call>')) == ("a", [Call("f", "{}")])
    assert registry.reasoning_parser("mine") == ReasoningParser("<reason>", "</reason>", assumed=False)


def test_a_package_brings_parsers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "\n".join([*code_of_docs(), "OWN = TOOL_PARSERS['mine']", "THINK = REASONING_PARSERS['mine']"])
    (tmp_path / "parsers_of_a_package.py").write_text(source)
    info = tmp_path / "parsers-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parsers\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[meshlm.tool_parsers]\nother = parsers_of_a_package:FORM\n")
    with pytest.raises(plugins.PluginError, match=r"plug-in other \(parsers 1.2.*ToolParser expected, got Form"):
        registry.load({}, "", "")
    (info / "entry_points.txt").write_text(
        "[meshlm.tool_parsers]\nmine = parsers_of_a_package:OWN\n[meshlm.reasoning_parsers]\nmine = parsers_of_a_package:THINK\n"
    )
    plugins._installed.cache_clear()
    registry.load({}, "", "")
    assert registry.tool_parser("mine").tags == ("<call>", "</call>")
    assert registry.reasoning_parser("mine").close == "</reason>"


def test_the_documentation_names_each_parser() -> None:
    page = DOCS.read_text()
    assert [name for name in (*registry.TOOL_PARSERS, *registry.REASONING_PARSERS) if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("", "no dict TOOL_PARSERS"),
        ("TOOL_PARSERS = {'a': 3}", "ToolParser expected, got int"),
        (
            "from meshlm.runtime.parsers.registry import TOOL_PARSERS as t\nTOOL_PARSERS = {'hermes': t['xlam']}",
            "there is a parser hermes already",
        ),
    ],
)
def test_a_file_that_cannot_be_used(source: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(ParserError, match=why) as caught:
        registry.load({}, str(path), "")
    assert str(caught.value).startswith(f"--tool-parser-plugin {path}: ")


def test_names_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ParserError, match=r"--tool-call-parser nobody: there are .*hermes"):
        registry.tool_parser("nobody")
    for name in ("nobody", "...", "<a>...", "a...a"):
        with pytest.raises(ParserError, match=r"there are .*qwen3"):
            registry.reasoning_parser(name)
    with pytest.raises(
        ParserError, match=r"--tool-call-parser minimax_m3: its calls are read by compiled code.*there are"
    ):
        registry.tool_parser("minimax_m3")
    with pytest.raises(ParserError, match="missing"):
        registry.load({}, str(tmp_path / "missing.py"), "")


def test_a_name_may_spell_out_two_texts() -> None:
    assert registry.reasoning_parser("<a>...</a>") == ReasoningParser("<a>", "</a>", assumed=False)


# The names of vLLM 0.26.
VLLM_TOOLS = """
apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 ernie45
functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hunyuan_a13b hy_v3 inkling
internlm jamba kimi_k2 lfm2 llama3_json llama4_json llama4_pythonic longcat mimo minicpm5 minimax_m2
minimax_m3 mistral olmo3 openai phi4_mini_json poolside_v1 pythonic qwen3_coder qwen3_xml seed_oss step3
step3p5 xlam
"""
VLLM_REASONING = """
cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 ernie45 gemma4 glm45 glm47 granite holo2
hunyuan_a13b hy_v3 inkling kimi_k2 mimo minimax_m2 minimax_m2_append_think minimax_m3 mistral nemotron_v3
olmo3 openai_gptoss poolside_v1 qwen3 seed_oss step3 step3p5
"""


def test_each_name_of_vllms_is_there_or_refused_with_the_reason() -> None:
    assert {*VLLM_TOOLS.split()} - {*registry.TOOL_PARSERS} == {"inkling", "minimax_m3"}
    assert {*VLLM_REASONING.split()} - {*registry.REASONING_PARSERS} == {"inkling"}
    assert set(registry.NOT_THERE) == {"inkling", "minimax_m3"}
