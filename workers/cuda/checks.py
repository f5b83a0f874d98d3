"""What a GPU must have before anything is loaded onto it. Each failure is one line for the user."""

import torch

from meshlm.runtime.errors import ProcessFatal


def check_gpu() -> None:
    """There is a GPU, and this torch has code for it."""
    if not torch.cuda.is_available():
        raise ProcessFatal("--device cuda: torch sees no GPU (driver, or a CPU build of torch)")
    capability, built = torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
    if not runs_on(built, capability):
        raise ProcessFatal(
            f"--device cuda: {torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}; "
            f"this torch is built for {', '.join(built)}; use --device cpu or another build of torch"
        )


def runs_on(built: list[str], capability: tuple[int, int]) -> bool:
    """Code for sm_XY runs on X.Y and later minor versions; compute_XY is compiled for anything later."""
    for name in built:
        kind, _, number = name.partition("_")
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        theirs = (int(digits[:-1]), int(digits[-1]))
        if theirs <= capability and (kind == "compute" or theirs[0] == capability[0]):
            return True
    return not built
