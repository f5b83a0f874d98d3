"""Rules of flags, what cannot be asked for together, or of this model or device, and their one reader.

A table is a function that yields its rules from top to bottom: what is refused, the flag, and what is said of it, which ends with what
would do. The tables are in flag_rules.py (one mesh and its model) and node_rules.py (nodes).
"""

from collections.abc import Iterator

from meshlm.supervisor.errors import UsageError

Rules = Iterator[tuple[object, str, str]]


def check(rules: Rules) -> None:
    """UsageError with the text of the first rule that refuses."""
    for refused, flag, text in rules:
        if refused:
            raise UsageError(f"{flag}: {text}" if text else flag)
