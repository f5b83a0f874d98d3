"""Plays the histories whose seeds stand on its standard input; says "wrong SEED" of each that goes wrong, and at the end "played N".

    seq 0 999 | python -P tests/simulation/play.py

A program of its own, so that test_histories.py can use two cores. Each world is one big cycle of objects, and taking it apart costs
more than a tenth of playing it: so children play, a batch each, and end with all that they made.
"""

import gc
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from history import violation
from scenario import make

BATCH = 50  # histories; their worlds take 50 MB


def play(seeds: Sequence[int]) -> int:
    """The exit code of a child that has played these."""
    try:
        for seed in seeds:
            if violation(make(seed)):
                print("wrong", seed, flush=True)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> int:
    seeds = list(map(int, sys.stdin.read().split()))
    violation(make(seeds[0]))  # what is made once: every child has it then
    gc.collect()
    gc.freeze()
    gc.disable()
    for start in range(0, len(seeds), BATCH):
        child = os.fork()
        if not child:
            os._exit(play(seeds[start : start + BATCH]))
        if os.waitpid(child, 0)[1]:
            return 1
    print("played", len(seeds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
