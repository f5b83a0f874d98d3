"""--structured-outputs-config: JSON whose fields are known, or one line that says what is wrong."""

import pytest

from meshlm.protocol.config import ServerConfig, StructuredOutputsConfig
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import resolve


def checked(text: str) -> StructuredOutputsConfig:
    server = ServerConfig(structured_outputs_config=text)
    resolve._check_structured_outputs(server)
    return server.structured_outputs


def test_its_fields() -> None:
    assert checked("{}") == StructuredOutputsConfig()
    text = '{"backend": "guidance", "disable_any_whitespace": true, "enable_in_reasoning": true}'
    expected = StructuredOutputsConfig(backend="guidance", disable_any_whitespace=True, enable_in_reasoning=True)
    assert checked(text) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "JSON is malformed|truncated"),
        ("[]", "Expected `object`"),
        ('{"backend": "xgrammar"}', "xgrammar"),
        ('{"disable_any_whitespace": 1}', "disable_any_whitespace"),
        ('{"reasoning_parser": "qwen3"}', "--reasoning-parser is the setting"),
    ],
)
def test_what_is_wrong_is_one_line(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as raised:
        checked(text)
    assert str(raised.value).startswith(f"--structured-outputs-config {text}: ")
    assert "\n" not in str(raised.value)
