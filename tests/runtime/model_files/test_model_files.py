"""What a model's files say, and what is wrong with one of them, in one line."""

import fnmatch
import json
from pathlib import Path

import pytest
from model_folders import CONFIG, folder_with, resolve_model, safetensors

from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files import chat_templates


@pytest.mark.parametrize(("eos", "ids"), [(None, ()), (2, (2,)), ([2, 7], (2, 7))])
def test_which_tokens_end_a_text(tmp_path: Path, eos: object, ids: tuple[int, ...]) -> None:
    found = resolve_model(folder_with(tmp_path, **{"config.json": {**CONFIG, "eos_token_id": eos}}))
    assert found.generation.eos_token_ids == ids


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", {**CONFIG, "eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ("config.json", {**CONFIG, "eos_token_id": [1, "x"]}, "eos_token_id must be a token id"),
        ("config.json", {**CONFIG, "architectures": 5}, "architecture 5 is not supported"),
        ("config.json", {**CONFIG, "rope_scaling": {"x": [float("nan")]}}, "x is nan; it must be a finite number"),
        ("config.json", {**CONFIG, "num_hidden_layers": 1 << 40}, "it may be 8192 at most"),
        (
            "modules.json",
            [{"type": "sentence_transformers.models.WordWeights"}],
            "module 'sentence_transformers.models.WordWe",
        ),
        ("modules.json", [{"type": "a.Dense", "path": "../x"}], "'../x' is no folder of this model"),
        ("modules.json", {"type": "a.Dense"}, "modules.json: Expected `array`"),
        ("config.json", b"[" * 5000 + b"]" * 5000, "recursion"),
        ("generation_config.json", {"temperature": "hot"}, "generation_config.json: temperature must be a number"),
        ("generation_config.json", {"top_k": [1]}, "generation_config.json: top_k must be a number"),
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja: 'utf-8' codec"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_of_it(tmp_path: Path, name: str, content: object, said: str) -> None:
    with pytest.raises(ModelFilesError, match=said) as told:
        resolve_model(folder_with(tmp_path, **{name: content}))
    assert str(tmp_path) in str(told.value)
    assert "\n" not in str(told.value)


NAMED = [{"name": "default", "template": "c"}, {"name": "tool_use", "template": "b"}]
IN_CONFIG = {"tokenizer_config.json": {"chat_template": NAMED}}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, {}),
        ({"tokenizer_config.json": {"chat_template": "a"}}, {"default": "a"}),
        ({"tokenizer_config.json": {"chat_template": None}}, {}),
        ({"tokenizer_config.json": {"chat_template": {"default": "a", "rag": "b"}}}, {"default": "a", "rag": "b"}),
        (IN_CONFIG, {"default": "c", "tool_use": "b"}),
        ({"chat_template.json": {"chat_template": "p"}}, {"default": "p"}),
        ({**IN_CONFIG, "chat_template.json": {"chat_template": "p"}}, {"default": "c", "tool_use": "b"}),
        ({**IN_CONFIG, "chat_template.jinja": b"j"}, {"default": "j", "tool_use": "b"}),
        (
            {"chat_template.jinja": b"j", "additional_chat_templates/tool_use.jinja": b"t"},
            {"default": "j", "tool_use": "t"},
        ),
    ],
)
def test_named_templates(tmp_path: Path, files: dict[str, object], found: dict[str, str]) -> None:
    assert resolve_model(folder_with(tmp_path, **files)).chat_templates == found


@pytest.mark.parametrize("wrong", [5, [{"name": "default"}], [{"name": ["x"], "template": "a"}], [{"template": "a"}]])
def test_what_is_no_template_is_said(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(ModelFilesError, match=r"tokenizer_config.json: chat_template must be"):
        resolve_model(folder_with(tmp_path, **{"tokenizer_config.json": {"chat_template": wrong}}))


def test_the_template_that_the_command_line_chooses(tmp_path: Path) -> None:
    """Is the only one: tools do not choose another one then."""
    folder = folder_with(tmp_path, **IN_CONFIG)
    file = tmp_path / "mine.jinja"
    file.write_text("mine")
    for given, text in (("tool_use", "b"), ("default", "c"), (str(file), "mine"), ("{{ x }}", "{{ x }}")):
        assert resolve_model(folder, chat_template=given).chat_templates == {"default": text}
    with pytest.raises(ModelFilesError, match=r"--chat-template rag: no such file.*; the model has default, tool_use"):
        resolve_model(folder, chat_template="rag")


def test_templates_come_with_the_tokenizer(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, **IN_CONFIG)
    other = tmp_path / "other"
    other.mkdir()
    assert resolve_model(folder, tokenizer=str(other)).chat_templates == {"default": "c", "tool_use": "b"}
    (other / "chat_template.jinja").write_text("o")
    assert resolve_model(folder, tokenizer=str(other)).chat_templates == {"default": "o"}


def test_templates_of_gguf() -> None:
    fields = {
        "tokenizer.chat_template": "a",
        "tokenizer.chat_template.tool_use": "b",
        "tokenizer.chat_templates": ["x"],
    }
    assert chat_templates.of_gguf(fields) == {"default": "a", "tool_use": "b"}


@pytest.mark.parametrize(("weights", "asked"), [("model.safetensors", 1), ("pytorch_model.bin", 2)])
def test_weights_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, asked: int) -> None:
    """Both formats are often there, so .bin is fetched only where there is nothing else."""
    calls: list[list[str]] = []

    def snapshot_download(model: str, allow_patterns: list[str], **_: object) -> str:
        calls.append(allow_patterns)
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        if any(fnmatch.fnmatch(weights, pattern) for pattern in allow_patterns):
            (tmp_path / weights).write_bytes(safetensors())
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model("owner/name").load_format == ("safetensors" if asked == 1 else "pt")
    assert len(calls) == asked


@pytest.mark.parametrize(
    ("load_format", "fetched"),
    [
        ("auto", ["model.safetensors"]),
        ("safetensors", ["model.safetensors"]),
        ("pt", ["pytorch_model.bin"]),
        ("dummy", []),
    ],
)
def test_of_the_hub_only_weights_of_the_format_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_format: str, fetched: list[str]
) -> None:
    """A repository often has both formats; --load-format dummy is for those who want neither."""
    there = {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": safetensors(),
        "pytorch_model.bin": b"",
        "optimizer.pt": b"",
        "training_args.bin": b"",
    }

    def snapshot_download(model: str, allow_patterns: list[str], ignore_patterns: list[str], **_: object) -> str:
        for name, content in there.items():
            if any(fnmatch.fnmatch(name, one) for one in allow_patterns) and not any(
                fnmatch.fnmatch(name, one) for one in ignore_patterns
            ):
                (tmp_path / name).write_bytes(content)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model("owner/name", load_format=load_format).load_format == load_format.replace(
        "auto", "safetensors"
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", *fetched]


@pytest.mark.parametrize(
    ("model", "load_format", "why"),
    [
        ("owner/name", "gguf", "MODEL owner/name names no file of it; owner/name:Q4_K_M does"),
        ("owner/name:Q4_K_M", "safetensors", "owner/name:Q4_K_M is a .gguf file"),
    ],
)
def test_a_format_that_a_hub_name_cannot_have_is_told_before_a_download(
    monkeypatch: pytest.MonkeyPatch, model: str, load_format: str, why: str
) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise AssertionError("nothing is to be fetched")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ModelFilesError, match=f"--load-format {load_format}: {why}"):
        resolve_model(model, load_format=load_format)


GGUFS = ("m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf", "m.Q8_0.gguf", "IQ2_M/m-IQ2_M.gguf")


def test_a_gguf_file_of_the_hub_by_its_quantisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model in several files the first."""
    asked: list[tuple[str, str | None]] = []

    def snapshot_download(model: str, allow_patterns: list[str], revision: str | None, **_: object) -> str:
        asked.append((model, revision))
        for name in GGUFS:
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                (tmp_path / name).parent.mkdir(exist_ok=True)
                (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    for quant, file in (("q4_k_m", GGUFS[0]), ("Q8_0", GGUFS[2]), ("IQ2_M", GGUFS[3])):
        with pytest.raises(ModelFilesError, match=rf"{file}: not a readable GGUF file"):
            resolve_model(f"owner/name:{quant}", revision="v2")
        assert asked.pop() == ("owner/name", "v2")
    with pytest.raises(ModelFilesError, match=r"owner/name:Q5_K: no .gguf file is of this .* m-Q4_K_M-00001-of"):
        resolve_model("owner/name:Q5_K")
    with pytest.raises(ModelFilesError, match=r"m\.Q8_0\.gguf: not a readable"):
        resolve_model(f"{tmp_path}:Q8_0")
    (tmp_path / "other-Q8_0.gguf").touch()
    with pytest.raises(ModelFilesError, match=r"several files are .* m\.Q8_0\.gguf, other-Q8_0\.gguf"):
        resolve_model(f"{tmp_path}:Q8_0")


def test_a_tokenizer_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def snapshot_download(model: str, revision: str | None, **_: object) -> str:
        asked.append((model, revision))
        return str(tmp_path / "other")

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "chat_template.jinja").write_text("o")
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    folder = folder_with(tmp_path)
    found = resolve_model(folder, tokenizer="owner/name", tokenizer_revision="v3")
    assert asked == [("owner/name", "v3")]
    assert (found.tokenizer_path, found.chat_templates) == (tmp_path / "other", {"default": "o"})
    assert resolve_model(folder, tokenizer_revision="v3").tokenizer_path == Path(folder)
    assert "--tokenizer-revision has no effect" in resolve_model(folder, tokenizer_revision="v3").notes[-1]
    for name in ("nowhere", "a/b/c", "./a/b", "a/b.json"):
        with pytest.raises(ModelFilesError, match=f"--tokenizer {name}: no such file or folder"):
            resolve_model(folder, tokenizer=name)


def test_flags_of_the_hub_without_effect_are_said(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    assert "--revision has no effect" in resolve_model(folder, revision="main").notes[-1]
    assert "--code-revision has no effect" in resolve_model(folder, code_revision="main").notes[-1]
    assert "--trust-remote-code has no effect" in resolve_model(folder, trust_remote_code=True).notes[-1]


@pytest.mark.parametrize("word", ["NaN", "Infinity", "1e999"])
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "hidden_size"])
def test_a_number_that_is_none_is_named(tmp_path: Path, key: str, word: str) -> None:
    """JSON has no such numbers, but Python writes and reads them."""
    folder_with(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, key: 7777}).replace("7777", word))
    with pytest.raises(ModelFilesError, match=rf"{key} is (nan|inf)"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text(f'{{"temperature": {word}}}')
    with pytest.raises(ModelFilesError, match=r"generation_config.json: temperature is (nan|inf)"):
        resolve_model(str(tmp_path))


def test_the_end_that_a_tokenizer_knows(tmp_path: Path) -> None:
    tokens = {"added_tokens": [{"id": 7, "content": "<end>"}], "model": {"vocab": {"a": 3}}}
    files = {"tokenizer.json": tokens, "tokenizer_config.json": {"eos_token": "<end>"}}
    found = resolve_model(folder_with(tmp_path, **{**files, "config.json": {**CONFIG, "eos_token_id": 2}}))
    assert (found.generation.eos_token_ids, found.tokenizer_eos) == ((2,), 7)
    other = tmp_path / "other"
    other.mkdir()
    assert resolve_model(str(tmp_path), tokenizer=str(other)).tokenizer_eos is None
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "a"}}')
    assert resolve_model(str(tmp_path)).tokenizer_eos == 3
