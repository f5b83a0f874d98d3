"""A subscriber to the events of one rank's prefix cache, as a router for vLLM has it: it knows the protocol and nothing of MeshLM."""

from collections.abc import Callable
from typing import Any

import msgspec
import zmq

LIMIT_MS = 60_000
Block = tuple[int, int]  # hash and group
_decode = msgspec.msgpack.decode


class KVSubscriber:
    """`known`: the tokens of each block. `numbers`: of all batches that came, replayed ones too."""

    def __init__(self, port: int, replay_port: int, topic: str = "kv") -> None:
        self._context = zmq.Context[Any]()
        self._sub, self._replay = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._sub.connect(f"tcp://127.0.0.1:{port}")
        self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._replay.connect(f"tcp://127.0.0.1:{replay_port}")
        self._topic = topic.encode()
        self.known: dict[Block, list[int]] = {}
        self.numbers: list[int] = []
        self.num_cleared = 0
        self.ranks: set[int] = set()

    def hear(self, true: Callable[[], bool]) -> None:
        """Apply events until this is true. AssertionError when none come any more."""
        while not true():
            assert self._sub.poll(LIMIT_MS), f"nothing came; known: {self.known}"
            topic, number, payload = self._sub.recv_multipart()
            assert topic == self._topic
            self.apply(int.from_bytes(number, "big"), payload)

    def replay(self, start: int) -> list[int]:
        """Apply what the publisher still has from there on; the numbers."""
        self._replay.send_multipart([b"", start.to_bytes(8, "big")])
        found: list[int] = []
        while True:
            assert self._replay.poll(LIMIT_MS), "the replay does not end"
            _, number, payload = self._replay.recv_multipart()
            if not payload:
                assert number == (-1).to_bytes(8, "big", signed=True)
                return found
            found.append(int.from_bytes(number, "big"))
            self.apply(found[-1], payload)

    def apply(self, number: int, payload: bytes) -> None:
        self.numbers.append(number)
        _, events, rank = _decode(payload)
        self.ranks.add(rank)
        for event in events:
            match event["type"]:
                case "BlockStored":
                    size, tokens = event["block_size"], event["token_ids"]
                    for at, name in enumerate(event["block_hashes"]):
                        self.known[name, event["group_idx"]] = tokens[at * size : (at + 1) * size]
                case "BlockRemoved":
                    for name in event["block_hashes"]:
                        self.known.pop((name, event["group_idx"]), None)
                case "AllBlocksCleared":
                    self.num_cleared += 1
                    self.known.clear()

    def has(self, tokens: list[int]) -> bool:
        """Whether it knows of blocks with these tokens, block by block."""
        blocks = [tokens[at : at + 16] for at in range(0, len(tokens) - 15, 16)]
        return all(block in self.known.values() for block in blocks)

    def close(self) -> None:
        self._context.destroy(0)
