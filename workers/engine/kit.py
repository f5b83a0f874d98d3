"""What the kernels of a device bring to the engine: the only thing in which a CPU, an old GPU and a GPU with Triton differ in a step.

Plain torch (and the compiled C kernels of the CPU) does it on any device, without CUDA graphs; `TritonKit` (triton_kit.py) is another,
since Triton may not even be installed beside a CPU build of torch. The rows hold all tokens and block tables on the device
(rows/device_rows.py); a step brings what has changed there, and its own columns. Used by the stepper thread.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshlm.protocol.config import MeshConfig
from meshlm.workers.batch import RequestLens, StepInputs
from meshlm.workers.graphs.dispatcher import Captures, Dispatcher
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.output.sampler import TorchHead
from meshlm.workers.rows.changes import I32, unpacked
from meshlm.workers.rows.device_rows import DeviceRows, put
from meshlm.workers.rows.step_columns import StepColumns

if TYPE_CHECKING:
    from meshlm.workers.engine import ProgressReport
    from meshlm.workers.engine.engine import ModelEngine
    from meshlm.workers.engine.triton_inputs import TritonInputs
    from meshlm.workers.lora.adapter_rows import AdapterRows
    from meshlm.workers.output.logits_sampler import LogitsSampler
    from meshlm.workers.speculative.verifier import Verifier
    from meshlm.workers.states.drafted import DraftStates


class TorchInputs:
    """A device's way to prepare steps; nothing in it waits for the device. By plain torch: positions are counted on the host,
    tokens and slots are looked up on the device."""

    def __init__(self, rows: DeviceRows) -> None:
        self._rows, self._device = rows, rows.state.device
        self.draft_states: DraftStates | None = None  # where drafts and states meet
        self.adapters: AdapterRows | None = None  # with --enable-lora

    def send(self, step: StepColumns, size: int, changes: I32, segments: int, places: NDArray[np.int64]) -> None:
        """Apply the changes (changes.py) to the rows, and have the step's columns on the device, padded to `size` requests."""
        self.apply(changes, segments)

    def apply(self, changes: I32, segments: int) -> None:
        """The changes alone, of a step whose columns depend on its rows' tokens."""
        if segments:
            places, values = unpacked(changes, segments)
            self._rows.state[put(places, self._device)] = put(values, self._device)

    def of_step(self, step: StepColumns) -> StepInputs:
        rows, block_size, device = self._rows, self._rows.block_size, self._device
        lens = step.starts.astype(np.int64) + step.counts
        token_rows, positions = step.of_tokens()
        of_token, at, nth = put(np.stack((token_rows, positions, positions // block_size)), device)
        num_decodes, width = step.num_decodes, -(-int(lens.max()) // block_size)
        seq_lens, n = put(np.stack((lens, step.rows)), device)
        slots, tables = [], []
        for table in rows.block_tables:
            slots.append(table[of_token, nth].long() * block_size + at % block_size)
            tables.append(table[:, :width][n].long())
        types: Tensor | None = None
        second = rows.table.columns["second_from"]
        if second[step.rows].any():  # some tokens are of the second text of a pair
            begins = second[token_rows]
            types = put(((begins > 0) & (positions >= begins)).astype(np.int64), device)
        batch = StepInputs(
            input_ids=rows.tokens[of_token, at].long(),
            positions=at,
            slot_mapping=tuple(slots),
            block_tables=tuple(tables),
            logits_indices=put(step.lines().tokens, device),
            num_decodes=num_decodes,
            lens=RequestLens(
                seq_lens=seq_lens,
                query_lens=tuple(step.counts[num_decodes:].tolist()),
                context_lens=tuple(lens[num_decodes:].tolist()),
                max_decode_len=int(lens[:num_decodes].max()) if num_decodes else 0,
            ),
            vectors=None if rows.vectors is None else rows.vectors[: step.t],
            token_types=types,
            draft_pages=() if self.draft_states is None else self.draft_states.pages(step),
            adapters=None if self.adapters is None else self.adapters.of_step(step),
        )
        return batch if rows.media is None or not rows.media.in_use else rows.media.of_step(batch, step.t)

    def halves(self, step: StepColumns, batch: StepInputs, cut: int) -> tuple[StepInputs, StepInputs]:
        """Splits what `of_step` gave for it, as its first `cut` tokens and the rest; nobody samples."""
        first, second = step.halves(cut)
        both = self.of_step(first), self.of_step(second)
        return both[0], with_lines(both[1], batch, slice(cut, None))


def with_lines(half: StepInputs, batch: StepInputs, part: slice) -> StepInputs:
    """A half of a batch, with the lines of its tokens of all that came with prompts."""
    vectors, shift, deepstack = batch.vectors, batch.rope_shift, batch.deepstack
    return replace(
        half,
        vectors=None if vectors is None else vectors[part],
        rope_shift=None if shift is None else shift[:, part],
        deepstack=None if deepstack is None else deepstack[:, part],
    )


class TorchKit:
    """The engine calls these while it is made, in this order."""

    def draft_lines(self, config: MeshConfig) -> int:
        """Lines of rows with drafts that a step has at most, where these need room of their own."""
        return 0

    def inputs(self, rows: DeviceRows, *, samples: bool) -> "TorchInputs | TritonInputs":
        """samples: whether tokens are sampled by this worker (not on a stage of a pipeline before the last)."""
        return TorchInputs(rows)

    def head(
        self, model: Decoder, rows: DeviceRows, dtype: torch.dtype, *, samples: bool
    ) -> "TorchHead | LogitsSampler":
        return TorchHead(model, rows, dtype)

    def verification(self, engine: "ModelEngine") -> "Verifier | None":
        """What drafts and verifies; None without --speculative-config. ProcessFatal."""
        from meshlm.workers.speculative.drafters import verification_of  # which reads this file

        return verification_of(engine)

    def graphs(self, engine: "ModelEngine") -> tuple[Dispatcher, Captures]:
        """The CUDA graphs of this device, and when they are captured."""
        graphs = Dispatcher([], lambda key: None)
        return graphs, Captures(graphs, lambda: None)

    def attention_wave(self, engine: "ModelEngine") -> int:
        """Tokens of a prompt's chunk whose attention fills the device once; 0 where that is not known, or makes no difference."""
        return 0

    def compile_ahead(self, engine: "ModelEngine", report: "ProgressReport") -> None:
        """Have the kernels compiled, before there is a KV cache: here nothing is compiled."""

    def warm_up(self, engine: "ModelEngine") -> None:
        """Run what no first request should pay for. The KV cache is there, and holds nothing yet."""
        engine.dummy_step([1])
