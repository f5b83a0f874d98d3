"""The kinds of extras that the rows of a model engine may have (rows/extras/): here, and nowhere else in it, they have names."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshlm.protocol.media_spec import MediaSpec
from meshlm.workers.lora.make import adapter_rows
from meshlm.workers.media.stage import stage_of
from meshlm.workers.output.grammars import GrammarRows, Grammars
from meshlm.workers.output.logprobs import PromptLogprobsStep
from meshlm.workers.output.mask_process import MaskProcess
from meshlm.workers.output.pooler import PooledHeads, Pooler, lexical_head, load_dense
from meshlm.workers.output.processors import processors_of
from meshlm.workers.rows.device_rows import MediaBuffers, SequenceBreakersRows
from meshlm.workers.rows.extras.extra import RowExtra
from meshlm.workers.rows.extras.media_rows import MediaRows
from meshlm.workers.rows.extras.prompt_inputs import AudioRows, PromptEmbedsRows
from meshlm.workers.rows.extras.prompt_results import PoolingRows, PromptLogprobsRows

if TYPE_CHECKING:
    from meshlm.workers.engine.engine import ModelEngine


def kinds_of(engine: "ModelEngine", max_tokens: int) -> list[RowExtra[Tensor]]:
    """max_tokens: of a step, padded."""
    found: list[RowExtra[Tensor]] = [] if engine.verification is None else [engine.verification]
    if engine.config.adapters.enable_lora:
        found.append(adapter_rows(engine))
    media, embeds = engine.spec.media, engine.config.server.enable_prompt_embeds
    if engine.shard.is_first and (media is not None or embeds):
        size, rows = engine.resolved.spec.hidden_size, engine.rows
        rows.vectors = torch.zeros(max_tokens, size, dtype=engine.dtype, device=engine.device)
        if embeds:
            found.append(PromptEmbedsRows(rows.vectors))
    if media is not None:
        engine.rows.media = _buffers(engine, media, max_tokens)
        found.append(MediaRows(engine.rows, stage_of(engine), lambda: engine.resolved))
    if engine.spec.audio_encoder is not None:
        model, compute = engine.model, engine.compute
        found.append(
            AudioRows(
                engine.rows.table,
                lambda samples, pages: model.encode_audio(samples, pages, compute.caches),
                engine.device,
            )
        )
    return found + _kinds_of_output(engine) if engine.shard.is_last else found


def _buffers(engine: "ModelEngine", media: MediaSpec, max_tokens: int) -> MediaBuffers:
    shift, deepstack = None, None
    if media.mrope_section:
        shift = torch.zeros(3, max_tokens, dtype=torch.int64, device=engine.device)
    if media.deepstack and engine.shard.is_first:
        size = media.deepstack, max_tokens, media.hidden_size
        deepstack = torch.zeros(size, dtype=engine.dtype, device=engine.device)
    return MediaBuffers(shift, deepstack)


def _kinds_of_output(engine: "ModelEngine") -> list[RowExtra[Tensor]]:
    """Those that read the last layer's states, or choose tokens."""
    rows, model, resolved, columns = engine.rows, engine.model, engine.resolved, engine.rows.table.columns
    heads = PooledHeads(
        model.classifier,
        load_dense(resolved, engine.device),
        model.token_projection(),
        resolved.pooling,
        lexical_head(model, resolved, engine.device),
    )
    loads_ahead = engine.device.type == "cuda" and bool(resolved.eos_token_ids)
    processors = processors_of(engine.config, engine.device, rows.max_rows)
    columns.processors = None if processors is None else processors.apply
    columns.logprobs_mode = engine.config.server.logprobs_mode
    assert columns.breakers is not None
    logits_of = engine.compute.logits_of
    alone = engine.config.worker.deterministic and engine.device.type == "cuda"
    return [
        SequenceBreakersRows(columns.breakers),
        *([] if processors is None else [processors]),
        PromptLogprobsRows(columns, lambda spans: PromptLogprobsStep(spans, rows.tokens, logits_of, alone=alone)),
        PoolingRows(columns, Pooler(heads).for_step),
        GrammarRows(Grammars(MaskProcess(resolved)), together=engine.together is not None, loads_ahead=loads_ahead),
    ]
