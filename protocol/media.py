"""Images, video and audio of a prompt, on their way from the media process to the encoder of a model that sees or hears.

The media process (mediaproc/) decodes an item, has the model's processor make tensors of it, and leaves these in a file of the host's
shared memory; what travels with the request is where they lie and which tokens stand for the item in the prompt. The detokenizer puts
those tokens where the chat template has the item's placeholder, and says at which position that is.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Literal, Self

from msgspec import Struct
from msgspec.structs import replace

from meshlm.protocol.extra_kind import EncoderInput, ExtraKind, Span
from meshlm.protocol.wire.parts import joined

MediaDType = Literal["uint8", "int32", "int64", "float32", "bool"]
ITEM_BYTES: dict[MediaDType, int] = {"uint8": 1, "int32": 4, "int64": 8, "float32": 4, "bool": 1}
DIGEST_BYTES = 32  # sha256
CACHED_STEPS = 4  # an encoder keeps the vectors of so many full steps


class Modality(StrEnum):
    """What an item is. Its value is what chat templates, flags and fields of requests call it."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


class MediaTensor(Struct, frozen=True, array_like=True):
    """One tensor of an item's file, contiguous, little-endian."""

    name: str  # of the processor's output: pixel_values, image_grid_thw, pixel_attention_mask, ...
    dtype: MediaDType
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file


class MediaItem(Struct, frozen=True):
    """One image, video or clip. Its vectors take the places of those tokens of `replacement` that `is_vector` marks, in order."""

    modality: Modality
    digest: bytes  # DIGEST_BYTES: of all tensors with their names and shapes, and of what the processor was told
    replacement: bytes  # int32 column: the token ids that stand for the item in the prompt, with those that begin and end it or a row
    is_vector: (
        bytes  # one byte for each token of `replacement`: 1 where a vector of the encoder takes the token's place
    )
    position: int = -1  # of the first token of `replacement` in the prompt; -1: the prompt is not expanded yet
    grid: tuple[int, int, int] = (1, 1, 1)  # frames, rows and columns of the vectors, after merging; M-RoPE goes by it
    path: str = ""  # of the file of this host's shared memory that has the tensors
    tensors: tuple[MediaTensor, ...] = ()
    is_uncut: bool = False  # its tokens attend to one another, so one step computes them
    placeholder: int = -1  # the token that a chat template writes for such an item, in whose place `replacement` comes
    before: str = ""  # text that the model's processor puts in front of the replacement ...
    after: str = ""  # ... and behind it
    times: tuple[
        int, ...
    ] = ()  # of a video whose frames M-RoPE does not take one by one: the position of each, from 0 on

    @property
    def num_tokens(self) -> int:
        return len(self.is_vector)

    @property
    def num_vectors(self) -> int:
        return self.is_vector.count(1)

    @property
    def span(self) -> Span:
        return self.position, self.num_tokens

    @property
    def encoder_input(self) -> EncoderInput:
        first, last = self.is_vector.find(1), self.is_vector.rfind(1)
        return EncoderInput(
            self.position, self.position + first, self.position + last + 1, self.num_vectors, self.digest
        )


class Media(ExtraKind, frozen=True, tag="media"):
    """All items of a prompt, in its order."""

    items: tuple[MediaItem, ...]

    @property
    def first_uncertain(self) -> int:
        """Where the first item stands."""
        return min(item.position for item in self.items)

    @property
    def num_bytes(self) -> int:
        return sum(len(item.replacement) + len(item.is_vector) + DIGEST_BYTES for item in self.items)

    @property
    def uncut(self) -> Sequence[Span]:
        return tuple(item.span for item in self.items if item.is_uncut)

    @property
    def encoder_inputs(self) -> Sequence[EncoderInput]:
        return [item.encoder_input for item in self.items if item.num_vectors]

    def within(self, begin: int, end: int) -> Iterator[tuple[MediaItem, int, int]]:
        """The items that have tokens from `begin` to `end`, each with its first and last such token, the latter exclusive."""
        for item in self.items:
            low, high = max(item.position, begin), min(item.position + item.num_tokens, end)
            if low < high:
                yield item, low, high

    def key_parts(self, begin: int, end: int) -> bytes:
        """What is seen at these tokens: the digest of each item that has some of them, and which of its tokens they are."""
        found = [
            (item.digest, b"%d %d" % (low - begin, low - item.position)) for item, low, _ in self.within(begin, end)
        ]
        return joined(b"media", *(part for pair in found for part in pair)) if found else b""

    def cut(self, begin: int, end: int) -> Self | None:
        """ValueError where the cut goes through an item: half of an image is another one."""
        left = []
        for item, low, high in self.within(begin, end):
            if high - low < item.num_tokens:
                raise ValueError(f"the cut at {low} to {high} goes through the {item.modality} at {item.position}")
            left.append(replace(item, position=item.position - begin))
        return replace(self, items=tuple(left)) if left else None
