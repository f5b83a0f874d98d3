"""The limits that a configuration gives one rank's scheduler."""

from msgspec import Struct

from meshlm.protocol.config import KVTransferConfig

MAX_CRASHES = 2  # the first may be anybody's doing


class Limits(Struct, frozen=True, kw_only=True):
    """The limits that the configuration gives this rank."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_encoder_input_tokens: int = (
        0  # vectors that a step encodes, if of more than one item; 0: as many as it has tokens
    )
    async_depth: int = 2
    chunked_prefill: bool = True
    even_prefill: bool = True
    max_itl_s: float | None = None  # the longest bearable step
    prefix_caching: bool = True
    by_priority: bool = False
    num_workers: int = 1
    first_worker: int = 0
    max_crashes: int = MAX_CRASHES  # of workers under a request that got no token between them, before it is suspected
    dp_rank: int = 0  # its number, as clients know it
    lockstep: bool = False  # it steps together with the other ranks
    sleep_mode: bool = False  # its workers may sleep
    kv_metrics_sample: float = 0.0  # share of the pages that --kv-cache-metrics looks at; 0: none
    kv_events: bool = False  # others follow what the prefix cache has (--kv-events-config)
    counts_drafts: bool = False  # of each request: detokenizers are told how many of its drafts were accepted
    max_loras: int = 1  # adapters that the rows of a step may have
    num_stages: int = 1  # of the pipeline: so many steps are in flight, each with requests of its own
    kv_transfer: KVTransferConfig = KVTransferConfig()
    secret: bytes = b""  # that no other process knows
