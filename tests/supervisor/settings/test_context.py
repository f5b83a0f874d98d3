"""--max-model-len auto: the model's context, or what a worker finds that fits; then the mesh starts again."""

from pathlib import Path
from typing import Any

import pytest

from meshlm.protocol.config.model import AUTO_LEN
from meshlm.supervisor.errors import ContextDoesNotFit, StartError, UsageError
from meshlm.supervisor.settings import flags, resolve
from meshlm.supervisor.settings.sizes import size_parser


def resolved_length(at_most: int | None, **values: Any) -> int:
    config = resolve.resolve(flags.build({"device": "fake", **values}, None), at_most)
    assert config.resolved is not None
    return config.resolved.max_model_len


def test_the_word_and_the_number() -> None:
    parse = size_parser({"count": True, "auto": True})
    assert parse is not None
    assert (parse("auto"), parse("-1"), parse("8k")) == (AUTO_LEN, AUTO_LEN, 8000)
    assert flags.build({"max_model_len": -1}, None).model.max_model_len == AUTO_LEN


def test_a_file_may_say_it_too(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text('max-model-len = "auto"\n')
    assert flags.build({}, str(tmp_path / "m.toml")).model.max_model_len == AUTO_LEN


def test_it_is_the_models_context_or_what_fits() -> None:
    assert resolved_length(None, max_model_len=AUTO_LEN) == resolved_length(None) == 8192
    assert resolved_length(448, max_model_len=AUTO_LEN) == 448
    assert resolved_length(None, max_model_len=100) == 100


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"max_model_len": 0}, "--max-model-len 0: must be at least 1, or auto"),
        ({"max_model_len": AUTO_LEN, "nnodes": 2, "data_parallel_size": 2}, "the nodes of a mesh need a number"),
        ({"max_model_len": AUTO_LEN, "listen": "10.0.0.1:5555"}, "the nodes of a mesh need a number"),
    ],
)
def test_what_it_cannot_be(values: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        resolved_length(None, **values)


def test_a_start_is_tried_again_while_less_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks may differ in memory."""
    asked: list[int | None] = []

    def start(at_most: int | None) -> str:
        asked.append(at_most)
        if len(asked) < 3:
            raise ContextDoesNotFit("too little", 500 - 100 * len(asked))
        return "serves"

    assert resolve.fitting(start) == "serves"
    assert asked == [None, 400, 300]
    assert "--max-model-len auto: 300 tokens fit; starting again" in capsys.readouterr().err


def test_what_does_not_become_less_is_an_error() -> None:
    def start(at_most: int | None) -> None:
        raise ContextDoesNotFit("too little", 400)

    with pytest.raises(StartError, match="too little"):
        resolve.fitting(start)
