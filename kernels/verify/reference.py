"""The reference of verify/kernel.py, in plain Python."""

from torch import Tensor


def ngram(
    rows: Tensor, drafts: Tensor, known: Tensor, tokens: Tensor, found: Tensor, m: int, shortest: int, longest: int
) -> None:
    for nth in range(m):
        row, count = int(rows[nth]), int(drafts[nth])
        text = tokens[row, : int(known[row])].tolist()
        best, behind = 0, 0
        for end in range(1, len(text)):
            length = 0
            while length < min(longest, end) and text[end - 1 - length] == text[-1 - length]:
                length += 1
            if length > best:
                best, behind = length, end
        found[nth] = 0
        if count > 0 and best >= shortest:
            found[nth] = count
            for at in range(count):
                text.append(text[behind + at])
            tokens[row, len(text) - count : len(text)] = tokens.new_tensor(text[-count:])


def place(
    rows: Tensor, ends: Tensor, known: Tensor, tokens: Tensor, own: Tensor, starts: Tensor, entries: Tensor, m: int
) -> None:
    begin = 0
    for nth in range(m):
        row, end = int(rows[nth]), int(ends[nth])
        if own[nth] < 0:
            own[nth] = known[row] - 1
        for at in range(end - begin):
            starts[begin + at] = own[nth] + at
            entries[begin + at] = tokens[row, int(own[nth]) + at]
        begin = end


def accept(
    columns: tuple[Tensor, Tensor, Tensor, Tensor], known: Tensor, entries: Tensor, sampled: Tensor, counts: Tensor, m: int
) -> None:  # fmt: skip
    rows, ends, firsts, drafts = columns
    for nth in range(m):
        begin, first, kept = int(ends[nth - 1]) if nth else 0, int(firsts[nth]), 0
        if drafts[nth] < 0:
            counts[nth] = 0
            continue
        while kept < drafts[nth] and sampled[first + kept] == entries[begin + 1 + kept]:
            kept += 1
        counts[nth] = kept + 1
        known[int(rows[nth])] += kept + 1
