"""Shapes of messages that have a rule in one place for the frontend, `LLM.chat` and the command line."""

import pytest

from meshlm.runtime.errors import RequestError
from meshlm.runtime.mesh.messages import FIELDS_OF_THEIR_OWN, check_template_kwargs
from meshlm.supervisor.api.tokenizer import chat_prompt
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings.resolve import _check_template_kwargs


@pytest.mark.parametrize("name", FIELDS_OF_THEIR_OWN)
def test_an_argument_of_the_template_that_has_its_own_place(name: str) -> None:
    """The template would be given it twice, or the other one."""
    with pytest.raises(RequestError, match=name) as error:
        check_template_kwargs({"a": 1, name: True})
    assert error.value.param == "chat_template_kwargs"
    with pytest.raises(ValueError, match=name):
        chat_prompt([{"role": "user", "content": "a"}], None, None, {name: True}, True, False)
    with pytest.raises(UsageError, match=f"^--default-chat-template-kwargs: {name} "):
        _check_template_kwargs(f'{{"{name}": true}}')


def test_other_arguments_are_the_templates_to_know() -> None:
    check_template_kwargs({"enable_thinking": False, "bos_token": "<s>"})
    _check_template_kwargs('{"enable_thinking": false}')
