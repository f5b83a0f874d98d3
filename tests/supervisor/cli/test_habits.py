"""Words that users of other servers type."""

import re

import pytest

from meshlm.supervisor.cli import habits, main
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings.flags import settings


@pytest.mark.parametrize("words", [["version"], ["-V"], ["--version"]])
def test_the_version(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.run(words)
    assert (ended.value.code, capsys.readouterr().out.startswith("meshlm ")) == (0, True)


def test_no_words_say_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([]) == 0
    said = capsys.readouterr().out
    for command in re.findall(r"meshlm ([a-z]+) ", said.split("\n", 2)[2]):
        assert command in main.COMMANDS


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.run(["help", "drain"])
    assert "usage: meshlm drain" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main.run(["help"])
    assert "usage: meshlm" in capsys.readouterr().out


def test_commands_of_others_are_ours() -> None:
    assert habits.translated(["stop", "--timeout", "3"]) == ["drain", "--stop", "--timeout", "3"]
    assert habits.translated(["ps"]) == ["status"]
    assert habits.translated(["chat", "stop"]) == ["chat", "stop"]
    assert not {*habits.COMMANDS, *habits.INSTEAD, "help"} & set(main.COMMANDS)


@pytest.mark.parametrize("word", list(habits.INSTEAD))
def test_commands_that_are_not_here_say_what_is(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([word, "llama3"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert habits.INSTEAD[word] in error


def test_flags_of_others_say_ours() -> None:
    ours = {setting.flag for setting in settings()}
    ours |= {(setting.meta.extra or {}).get("short", "") for setting in settings() if setting.meta is not None}
    assert not ours & set(habits.FLAGS)
    for flag, instead in habits.FLAGS.items():
        with pytest.raises(UsageError, match=re.escape(f"{flag}; {instead}")):
            habits.translated(["serve", "model", f"{flag}=3"])
        if instead.endswith("is its name here"):
            assert instead.split()[0] in ours


@pytest.mark.parametrize("words", [["serve", "-c", "4096"], ["serve", "-ngl", "99"], ["serve", "--workers", "2"]])
def test_one_line_and_exit_code(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
