"""One sequence that the Python API waits for, and how it is asked for again after its detokenizer's death. Owned by client.py."""

import msgspec

from meshlm.protocol.columns import pack_i32
from meshlm.protocol.ids import Handle, Identity, RequestId
from meshlm.protocol.text_edge import Submit
from meshlm.supervisor.outputs import RequestOutput

MAX_ATTEMPTS = 5  # without a token


class Generated:
    """Choice number `choice` of `submit`, whose tokens are in `output`."""

    __slots__ = ("begun", "choice", "fruitless", "had", "output", "peer", "request", "submit")

    def __init__(self, request: RequestOutput, submit: Submit, choice: int) -> None:
        self.request, self.output = request, request.outputs[choice]
        self.submit, self.choice = submit, choice
        self.peer: Identity | None = None  # the detokenizer that has it
        self.begun = False  # its first token came
        self.had = self.fruitless = 0  # tokens at this attempt's begin; attempts since the last token

    @property
    def name(self) -> RequestId:
        """In the mesh."""
        return self.submit.request_ids[self.choice]

    def again(self, handle: Handle) -> bool:
        """Make its own Submit of what it was a part of, to go on after the tokens that are here; False when that was tried enough."""
        have = len(self.output.token_ids)
        self.fruitless = 1 if have > self.had else self.fruitless + 1
        self.had = have
        sampling = self.submit.sampling
        self.submit = msgspec.structs.replace(
            self.submit,
            handles=(handle,),
            request_ids=(self.name,),
            sampling=msgspec.structs.replace(sampling, seed=(sampling.seed + self.choice) & 0x7FFF_FFFF_FFFF_FFFF),
            attempt=self.submit.attempt + 1,
            delivered=pack_i32(self.output.token_ids),
        )
        self.choice, self.peer = 0, None
        return self.fruitless < MAX_ATTEMPTS
