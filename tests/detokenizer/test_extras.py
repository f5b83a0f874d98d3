"""What becomes of extras when a prompt is encoded."""

from array import array
from pathlib import Path

import pytest

from meshlm.detokenizer.encode import Encoder
from meshlm.detokenizer.extras import prepare
from meshlm.protocol.edges.text import TextPrompt
from meshlm.protocol.samplers import SequenceBreakers
from meshlm.runtime.model_files import tokenizer_files
from meshlm.runtime.model_files.tokenizer_files import token_bytes


@pytest.mark.parametrize("texts", [("\n", ":", '"', "*"), ("é",), ()])
def test_sequence_breakers_are_the_tokens_that_hold_one(smollm2: Path, texts: tuple[str, ...]) -> None:
    loaded = tokenizer_files.load(smollm2)
    encoding = Encoder(loaded, {}).encode_prompt(TextPrompt("So it is"), None)
    found = prepare(SequenceBreakers(texts), encoding)
    assert isinstance(found, SequenceBreakers)
    ids = array("i")
    ids.frombytes(found.token_ids)
    held = [token for token, data in enumerate(token_bytes(loaded)) if any(text.encode() in data for text in texts)]
    assert ids.tolist() == held
    assert bool(held) == bool(texts)
