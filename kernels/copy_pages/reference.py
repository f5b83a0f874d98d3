"""Lines of many columns from one memory to another, in plain torch.

target[c][target_lines[i]] = source[c][source_lines[i]]    for each column c
"""

from collections.abc import Sequence

from torch import Tensor


def copy_pages(source: Sequence[Tensor], source_lines: Tensor, target: Sequence[Tensor], target_lines: Tensor) -> None:
    """source, target: [lines, width] each, as many. source_lines, target_lines: int32 [count]; no line of the target twice."""
    for from_, to in zip(source, target, strict=True):
        to[target_lines.long()] = from_[source_lines.long()]
