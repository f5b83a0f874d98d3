"""The engine of a worker, by its device, and what the scheduler is told of it."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from meshlm.protocol.config import MeshConfig, ServerConfig
from meshlm.protocol.edges.step import WorkerReady
from meshlm.protocol.weights import WeightsVersion
from meshlm.runtime import platforms, plugins
from meshlm.runtime.errors import ProcessFatal
from meshlm.runtime.parsers import registry
from meshlm.workers.distributed.membership import Membership
from meshlm.workers.engine import Engine, EngineFacts, ProgressReport

if TYPE_CHECKING:
    from meshlm.workers.kv.moves import PageMoves


def load_ahead(config: MeshConfig) -> None:
    """Import what the engine needs; its weights have no place beside its predecessor's."""
    engine_of(config.require_resolved().device)


def make_engine(config: MeshConfig, worker: int, membership: Membership, report: ProgressReport) -> Engine:
    """The engine of the configured device for worker number `worker`; torch is imported only where it is needed."""
    load_parsers(config.server)
    return engine_of(config.require_resolved().device)(config, worker, membership, report)


def load_parsers(server: ServerConfig) -> None:
    """Those of plug-ins, where rows need one to know where their reasoning ends. ProcessFatal."""
    if registry.is_own(server.tool_call_parser, server.reasoning_parser):
        return
    try:
        registry.load(os.environ, server.tool_parser_plugin, server.reasoning_parser_plugin)
    except (plugins.PluginError, registry.ParserError) as error:
        raise ProcessFatal(str(error)) from None


def engine_of(device: str) -> Callable[[MeshConfig, int, Membership, ProgressReport], Engine]:
    """Imports what makes the engine of a device. ProcessFatal."""
    try:
        return platforms.engine_of(platforms.named(device))  # type: ignore[no-any-return]
    except plugins.PluginError as error:
        raise ProcessFatal(str(error)) from None


def page_moves(
    config: MeshConfig, worker: int, engine: Engine, tell: tuple[Callable[[Struct], None], Callable[[str], None]]
) -> "PageMoves | None":
    """All that moves pages of this engine (kv/moves.py), where the settings have them move. ProcessFatal."""
    if not config.kv_transfer.moves or engine.pages is None:
        return None
    from meshlm.workers.kv.moves import PageMoves

    return PageMoves(config, worker, engine.facts, engine.pages, tell)


def ready(
    session: int,
    facts: EngineFacts,
    max_num_batched_tokens: int,
    kept: tuple[bytes, bytes],
    weights: tuple[WeightsVersion, str],
) -> WorkerReady:
    """The answer to a Reset, when all steps before it are launched. kept: blocks and their hashes. weights: those that it has, and why
    no others."""
    return WorkerReady(
        session=session, num_blocks=facts.num_blocks, block_size=facts.block_size, max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, vocab_size=facts.vocab_size, kept=kept[0], kept_hashes=kept[1],
        max_drafts=facts.max_drafts, max_draft_lines=facts.max_draft_lines, pool_kinds=facts.pool_kinds,
        pooled_bytes=facts.pooled_bytes, kv_specs=facts.kv_specs, attention_wave=facts.attention_wave,
        weights=weights[0], behind=weights[1],
    )  # fmt: skip
