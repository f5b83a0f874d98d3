"""A process that lets others read KV pages on its GPU until its standard input ends, or it is killed: run as a program.

Prints where they lie. Byte i of column c of page p is (7 c + 3 p + i) mod 251.
"""

import sys

import msgspec
import torch

from meshlm.workers.kv.device_pages import DevicePages

NUM_COLUMNS, NUM_PAGES, WIDTH = 6, 300, 4096


def content() -> torch.Tensor:
    """uint8 [columns, pages, width]."""
    column, page, at = (torch.arange(count) for count in (NUM_COLUMNS, NUM_PAGES, WIDTH))
    return ((7 * column[:, None, None] + 3 * page[:, None] + at) % 251).to(torch.uint8)


def main() -> None:
    columns = content().cuda()
    pages = DevicePages(list(columns), shared=True)
    print(msgspec.json.encode(pages.memory).decode(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
