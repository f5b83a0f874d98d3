"""One folder an operation: kernel, reference, bench, tables. Products and sums are fused (a x b + c rounded once), as all tolerances
assume: Triton 3.9 does so unless told otherwise and warns, later ones will not."""

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
