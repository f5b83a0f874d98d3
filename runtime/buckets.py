"""Limits of the histograms of requests: vLLM's, but those of time between tokens and of
whole requests begin lower, where small models are.

Used by what frontends answer at /metrics and by the Python API's `get_metrics`.
"""

TTFT: tuple[float, ...] = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0)
TTFT += (7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
ITL: tuple[float, ...] = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
ITL += (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
LONG: tuple[float, ...] = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0)
LONG += (50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)


def of_tokens(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to the context's length."""
    powers = range(len(str(max_model_len)))
    return tuple(value for power in powers for digit in (1, 2, 5) if (value := digit * 10**power) <= max_model_len)
