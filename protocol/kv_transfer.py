"""The extra of a request whose KV comes from, or goes to, another mesh: `kv_transfer_params`, as vLLM's proxies and llm-d send them."""

from meshlm.protocol.extra_kind import ExtraKind


class KVTransfer(ExtraKind, frozen=True, tag="kv_transfer"):
    """`params` are the client's, JSON. They change no key: the KV of the same tokens is the same wherever it was computed."""

    params: bytes
    loads: bool = False  # do_remote_prefill: its prompt's KV lies in the mesh that params name
    leaves: bool = False  # do_remote_decode: its prompt's KV is leased to whoever gets the answer's params

    @property
    def num_bytes(self) -> int:
        return len(self.params)
