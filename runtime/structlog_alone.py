"""Imports structlog without rich: every process of the mesh imports this first of all (its __main__, or `meshlm serve`).

structlog imports rich where it is installed, to draw tracebacks that none of our lines has (logs.py formats them as text before
they are rendered): 80 ms in each of six processes or more. A program that uses `meshlm.LLM` keeps the structlog that it would have
without us, so nothing else imports this module.
"""

import sys

if "structlog" not in sys.modules and "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # how Python is told that a module cannot be imported
    import structlog  # noqa: F401

    del sys.modules["rich"]
