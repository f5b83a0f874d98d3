"""The record of copies of pages: a KV cache's columns into lines that lie side by side, and back. Pages of Llama-3.1-8B."""

import torch
from torch import Tensor

from meshlm.kernels.copy_pages import reference
from meshlm.kernels.copy_pages.kernel import columns_at, copy_pages
from meshlm.kernels.op import Launch, Op


def _make(dtype: torch.dtype, device: torch.device, num_columns: int, width: int, num_pages: int, count: int) -> Launch:
    """width: bytes of a page in one column."""
    cache = torch.randint(256, (num_columns, num_pages, width), dtype=torch.uint8, device=device)
    lines = torch.zeros(count, num_columns * width, dtype=torch.uint8, device=device)
    back = torch.zeros_like(cache)
    pages = torch.randperm(num_pages, device=device)[:count].int()
    nth = torch.arange(count, dtype=torch.int32, device=device)
    addresses = [each.data_ptr() for each in cache]
    own = columns_at(addresses, width, device)
    side_by_side = columns_at([lines.data_ptr() + c * width for c in range(num_columns)], num_columns * width, device)
    elsewhere = columns_at([each.data_ptr() for each in back], width, device)

    def run() -> list[Tensor | None]:
        copy_pages(own, pages, side_by_side, nth, count, width)
        copy_pages(side_by_side, nth, elsewhere, pages, count, width)
        return [lines, back]

    def expected() -> list[Tensor | None]:
        made, copied = torch.zeros_like(lines), torch.zeros_like(cache)
        columns = list(made.split(width, 1))
        reference.copy_pages(list(cache), pages, columns, nth)
        reference.copy_pages(columns, nth, list(copied), pages)
        return [made, copied]

    return Launch(run, expected, 4 * count * num_columns * width)


OPS = (
    Op(
        "copy_pages", _make, exact=2, dtypes=(torch.float32,),
        cases=[(4, 4096, 9, 5), (3, 24, 7, 7), (2, 20, 5, 1), (1, 7, 3, 2), (3, 18432, 4, 3)],
        of_models=[(64, 32768, 2048, count) for count in (1, 8, 64, 512)],
    ),
)  # fmt: skip
