"""What clients of vectors and scores read: `VectorsResponse` collects what the mesh gives, a function per endpoint writes it. Pure."""

import math
import struct
import sys
from array import array
from binascii import b2a_base64
from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

import msgspec

from meshlm.frontend.openai.responses import AnswerHead, WholeAnswer
from meshlm.frontend.vectors.parse import Pairs
from meshlm.frontend.vectors.schema import CohereEmbedRequest, EncodingCommon, RerankRequest
from meshlm.protocol.pool import Pool, PoolHead, PoolKind
from meshlm.protocol.pooling import PoolingSpec
from meshlm.runtime.client.placement import Choice, RowDetails
from meshlm.runtime.similarity import cosine, lines_of, max_sim, of_tokens

Json = dict[str, Any]
BYTES = "application/octet-stream"
NATIVE = "<" if sys.byteorder == "little" else ">"  # the order of bytes
NAN, SIGN = 0x7F, 0x80  # of a float of eight bits
_encode = msgspec.json.Encoder().encode


class VectorsResponse(WholeAnswer):
    """An answer of vectors. `parts`: how many prompts of the mesh each input of the client became, one after the other."""

    def __init__(
        self, head: AnswerHead, write: "Callable[[VectorsResponse], bytes]", parts: Sequence[int] = ()
    ) -> None:
        super().__init__(head)
        self._write, self._parts = write, parts

    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None:
        if details is not None:
            self.note(choice, details)
            if details.finished is not None:
                self.ended()

    def body(self) -> bytes:
        return self._write(self)

    def vectors(self) -> "list[array[float]]":
        """One for each input: the mean of its parts, by their numbers of tokens, where it has several."""
        found = [array("f", choice.pooled) for choice in self.choices]
        if not any(count > 1 for count in self._parts):
            return found
        joined, begin = [], 0
        for count in self._parts:
            mine, own = found[begin : begin + count], self.choices[begin : begin + count]
            weights = [choice.num_prompt_tokens for choice in own]
            total = sum(weights)
            columns = zip(*mine, strict=True)
            joined.append(mine[0] if count == 1 else array("f", [sum(map(mul, c, weights)) / total for c in columns]))
            begin += count
        return joined

    def lines(self) -> "list[list[array[float]]]":
        """Each input's vectors, where the task gives one for each token."""
        return [lines_of(*self.of_tokens(choice)) for choice in self.choices]

    def of_tokens(self, choice: Choice) -> "tuple[array[float], int]":
        """An input's vectors of tokens, one after the other, and their number."""
        flat = array("f", choice.pooled)
        if not self.pool.needs_prompt_ids:
            return flat, choice.num_prompt_tokens
        ids = memoryview(self.prompt[choice.prompt_index].prompt_token_ids).cast("i").tolist()
        return of_tokens(flat, ids, self.pool)

    def flat(self) -> "list[array[float]]":
        """Each input's numbers, all vectors of tokens one after the other."""
        if self.pool.kind is not PoolKind.ALL:
            return self.vectors()
        return [self.of_tokens(choice)[0] for choice in self.choices]

    def usage(self) -> Json:
        prompt = self.num_prompt_tokens()
        details = {"cached_tokens": sum(self.num_cached.values())}
        counts = {"prompt_tokens": prompt, "total_tokens": prompt, "completion_tokens": 0}
        return {**counts, "prompt_tokens_details": details}

    def listed(self, data: list[Json]) -> bytes:
        """The form that OpenAI's lists have."""
        usage = {**self.usage(), "prompt_tokens_details": None}
        head = {"id": self.request_id, "object": "list", "created": self.created, "model": self.model}
        return _encode({**head, "data": data, "usage": usage})

    @property
    def pool(self) -> Pool:
        """What was asked of the mesh."""
        (pool,) = self.parsed_request.mesh.extras
        assert isinstance(pool, Pool)
        return pool


# --- embeddings, pooling ---


def write_encoded(answer: VectorsResponse, body: EncodingCommon, kind: str) -> bytes:
    """kind: embedding or pooling, which is the name of an entry too; its field is `embedding` or `data`."""
    if body.encoding_format in ("bytes", "bytes_only"):
        return _bytes(answer, body)
    values: list[Any]
    if body.encoding_format == "base64":
        values = [b2a_base64(packed(vector, body), newline=False).decode() for vector in answer.flat()]
    elif answer.pool.kind is PoolKind.ALL:
        values = [[line.tolist() for line in lines] for lines in answer.lines()]
    else:
        values = [vector.tolist() for vector in answer.vectors()]
    field = "embedding" if kind == "embedding" else "data"
    return answer.listed([{"index": place, "object": kind, field: value} for place, value in enumerate(values)])


def packed(vector: "array[float]", body: EncodingCommon) -> bytes:
    """A vector in the dtype and the order of bytes that the client wants."""
    order = {"little": "<", "big": ">"}.get(body.endianness or "native", NATIVE)
    if body.embed_dtype == "float16":
        most = 65504.0
        inside = [value if -most <= value <= most else math.copysign(most, value) for value in vector]
        return struct.pack(f"{order}{len(inside)}e", *inside)
    if body.embed_dtype == "bfloat16":
        bits = array("I", vector.tobytes())
        # To the nearest, ties to even.
        return _ordered(array("H", [min(bit + 0x7FFF + (bit >> 16 & 1), 0xFFFFFFFF) >> 16 for bit in bits]), order)
    if body.embed_dtype is not None and body.embed_dtype in ROUNDERS:
        return bytes(map(ROUNDERS[body.embed_dtype], vector))
    return _ordered(vector, order)


def _ordered(numbers: "array[Any]", order: str) -> bytes:
    if order != NATIVE:
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def _bytes(answer: VectorsResponse, body: EncodingCommon) -> bytes:
    """All vectors one after the other; a header says where each is, but for `bytes_only`."""
    of_tokens = answer.pool.kind is PoolKind.ALL
    form = {"embed_dtype": body.embed_dtype or "float32", "endianness": body.endianness or "native"}
    parts, data, begin = [], [], 0
    for place, (choice, vector) in enumerate(zip(answer.choices, answer.flat(), strict=False)):
        parts.append(packed(vector, body))
        rows = answer.of_tokens(choice)[1] if of_tokens else 0
        shape = [rows, len(vector) // rows] if rows else [len(vector)]
        where = {"start": begin, "end": begin + len(parts[-1]), "shape": shape}
        data.append({"index": place, **form, **where})
        begin += len(parts[-1])
    answer.media_type = BYTES
    if body.encoding_format == "bytes":
        head = {"id": answer.request_id, "created": answer.created, "model": answer.model, "data": data}
        usage = {**answer.usage(), "prompt_tokens_details": None}
        answer.headers["metadata"] = _encode({**head, "usage": usage}).decode()
    return b"".join(parts)


def _rounder(exponent_bits: int, largest: int) -> Callable[[float], int]:
    """To the byte of the nearest float of eight bits (OCP 8-bit floating point), ties to even. What is larger becomes `largest`, as in
    newer versions of torch."""
    mantissa_bits = 7 - exponent_bits
    bias, ones = (1 << exponent_bits - 1) - 1, 1 << mantissa_bits

    def value(byte: int) -> float:
        exponent, mantissa = divmod(byte, ones)
        if not exponent:
            return math.ldexp(mantissa, 1 - bias - mantissa_bits)
        return math.ldexp(ones + mantissa, exponent - bias - mantissa_bits)

    between = [(value(byte) + value(byte + 1)) / 2 for byte in range(largest)]

    def rounded(number: float) -> int:
        if math.isnan(number):
            return NAN
        size, sign = abs(number), SIGN if math.copysign(1.0, number) < 0 else 0
        byte = bisect_left(between, size)
        if byte < largest and between[byte] == size:
            byte += byte & 1  # halfway
        return sign | byte

    return rounded


# Up to the largest number, and to infinity, which e4m3 has not.
ROUNDERS = {"fp8_e4m3": _rounder(4, 0x7E), "fp8_e5m2": _rounder(5, 0x7C)}


# --- classes, scores ---


def write_classes(answer: VectorsResponse, spec: PoolingSpec) -> bytes:
    data = []
    for place, vector in enumerate(answer.vectors()):
        probs = vector.tolist()
        best = max(range(len(probs)), key=probs.__getitem__)
        label = spec.labels[best] if best < len(spec.labels) else f"LABEL_{best}"  # as transformers names it
        data.append({"index": place, "label": label, "probs": probs, "num_classes": len(probs)})
    return answer.listed(data)


def scores_of(answer: VectorsResponse, pairs: Pairs) -> list[float]:
    """A classifier's, or how alike embeddings are: their cosine; of tokens' vectors the sum of each query token's best."""
    if answer.pool.head is PoolHead.CLASSIFY:
        return [vector[0] for vector in answer.vectors()]
    count = len(pairs.queries)
    if answer.pool.kind is PoolKind.ALL:
        lines = answer.lines()
        return [max_sim(lines[query], lines[count + document]) for query, document in pairs.indices]
    vectors = answer.vectors()
    return [cosine(vectors[query], vectors[count + document]) for query, document in pairs.indices]


def write_scores(answer: VectorsResponse, pairs: Pairs) -> bytes:
    scores = scores_of(answer, pairs)
    return answer.listed([{"index": place, "object": "score", "score": score} for place, score in enumerate(scores)])


def write_ranks(answer: VectorsResponse, pairs: Pairs, body: RerankRequest) -> bytes:
    """POST /rerank: the best first."""
    found = []
    for place, score in enumerate(scores_of(answer, pairs)):
        document = {"text": pairs.documents[place], "multi_modal": None} if body.return_documents else None
        found.append({"index": place, "document": document, "relevance_score": score})
    found.sort(key=lambda one: -one["relevance_score"])  # type: ignore[operator]
    usage = {name: answer.usage()[name] for name in ("prompt_tokens", "total_tokens")}
    results = found[: body.top_n] if body.top_n else found
    return _encode({"id": answer.request_id, "model": answer.model, "usage": usage, "results": results})


# --- Cohere's form ---


def write_cohere(answer: VectorsResponse, body: CohereEmbedRequest) -> bytes:
    vectors = answer.vectors()
    forms: dict[str, Callable[[array[float]], Any]] = {
        "float": lambda vector: vector.tolist(),
        "base64": lambda vector: b2a_base64(_ordered(vector, "<"), newline=False).decode(),
        "ubinary": _bits,
        "binary": lambda vector: [byte - 128 for byte in _bits(vector)],
    }
    kinds = dict.fromkeys(body.embedding_types or ("float",))
    found: Json = {
        "id": answer.request_id,
        "embeddings": {kind: [forms[kind](vector) for vector in vectors] for kind in kinds},
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": answer.num_prompt_tokens(), "image_tokens": 0},
        },
        "response_type": "embeddings_by_type",
    }
    return _encode(found if body.texts is None else {**found, "texts": body.texts})


def _bits(vector: "array[float]") -> list[int]:
    """Eight signs in a byte, the first the highest."""
    signs = [value >= 0 for value in vector]
    return [sum(sign << 7 - place for place, sign in enumerate(signs[at : at + 8])) for at in range(0, len(signs), 8)]
