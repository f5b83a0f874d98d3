"""A sequence that was generated, as a line of the files of --record-requests. Frontends write it (observe/recorder.py), and
`meshlm replay` reads it.

It is a line of a batch file, too: `meshlm run-batch` answers it.
"""

from typing import Any, Literal

from msgspec import Struct

from meshlm.protocol.wire.ids import FinishReason


class RecordedSequence(Struct, frozen=True, kw_only=True):
    """`body` is the completion of token ids that asks for this sequence alone, with the seed that it drew from."""

    custom_id: str  # the sequence's name in the mesh
    method: Literal["POST"] = "POST"
    url: Literal["/v1/completions"] = "/v1/completions"
    body: dict[str, Any]
    output_token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[float] | None = None  # of output_token_ids, where the client asked for them and they are kept
    request_id: str = ""  # of the answer that it is in
    choice: int = 0  # there
    path: str = ""  # that was asked
    created: int = 0  # seconds since 1970
    root: str = ""  # where the model's files were
    system_fingerprint: str | None = None
    not_replayable: list[str] = []  # fields of the request that `body` cannot say
