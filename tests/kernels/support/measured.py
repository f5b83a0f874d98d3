"""What a bench of the tuner finds of a case; no piece of the work is said to take longer than compiling some candidates."""

from meshlm.kernels.tuning import products
from meshlm.kernels.tuning.core import Case, Times
from meshlm.kernels.tuning.products import ProductBench


def measured(bench: ProductBench, case: Case) -> Times:
    work = bench.measure(case)
    try:
        while True:
            assert 0 < next(work) <= products.COMPILE_S
    except StopIteration as end:
        times: Times = end.value
        return times
