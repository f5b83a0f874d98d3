"""A platform: `--device tiny` computes on this host's cores as `--device cpu` does, with attention by plain torch and 64 MiB of KV cache.

The supervisor reads this module, so torch is imported in engine.py alone.
"""

from meshlm.runtime.platforms import Platform


class Tiny(Platform):
    name, engine = "tiny", "meshlm_tiny.engine:engine"
    max_num_seqs, max_num_batched_tokens = 8, 256

    def kv_cache_bytes(self) -> int | None:
        return 64 << 20


TINY = Tiny()
