"""An I/O processor: `data` is a question and some texts, the answer says which text is nearest to it and how near."""

from array import array
from collections.abc import Sequence
from math import sqrt
from typing import Any

from meshlm.runtime.io_processors import IOProcessor


class Nearest(IOProcessor):
    def parse_data(self, data: Any) -> list[str]:
        if not (isinstance(data, dict) and isinstance(data.get("question"), str) and data.get("texts")):
            raise ValueError("an object with question and texts is expected")
        if not all(isinstance(text, str) for text in data["texts"]):
            raise ValueError("texts: each must be a text")
        return [data["question"], *data["texts"]]

    def pre_process(self, data: list[str], request_id: str) -> list[str]:
        return data

    def post_process(self, vectors: "Sequence[array[float]]", request_id: str) -> dict[str, Any]:
        question, *texts = vectors
        nearness = [_cosine(question, text) for text in texts]
        best = max(range(len(texts)), key=nearness.__getitem__)
        return {"nearest": best, "nearness": nearness}


def _cosine(one: "array[float]", other: "array[float]") -> float:
    product = sum(a * b for a, b in zip(one, other, strict=True))
    return product / (sqrt(sum(a * a for a in one)) * sqrt(sum(b * b for b in other)) or 1.0)
