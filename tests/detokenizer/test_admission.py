"""What becomes of a prompt before a scheduler sees it."""

from array import array

import pytest

from meshlm.detokenizer.admission import checked_prompt
from meshlm.protocol.edges.text import Submit, TextParams, TextPrompt
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Handle, RequestId


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (TextParams(), [1, 2, 3, 4]),
        (TextParams(truncate_prompt_tokens=3), [2, 3, 4]),
        (TextParams(truncate_prompt_tokens=3, truncation_side="right"), [1, 2, 3]),
        (TextParams(truncate_prompt_tokens=9, truncation_side="right"), [1, 2, 3, 4]),
        (TextParams(truncation_side="right"), [1, 2, 3, 4]),
    ],
)
def test_a_prompt_is_cut_on_the_side_that_is_asked_for(text: TextParams, kept: list[int]) -> None:
    submit = Submit((Handle(1),), (RequestId("r"),), TextPrompt("a"), SamplingParams(), text)
    assert checked_prompt(array("i", [1, 2, 3, 4]), submit, 100, 10).tolist() == kept
