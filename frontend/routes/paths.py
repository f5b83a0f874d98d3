"""Paths by what is asked of a request before its route has it. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from meshlm.frontend.routes.operation import ANY_KEY, Operation
from meshlm.runtime.api_keys import ADMIN, INFERENCE


class Paths(NamedTuple):
    """Of all routes, also of those that this server has not."""

    submits: frozenset[str]  # the mesh computes for them
    counted: frozenset[str]  # they count for a key's limits
    open: frozenset[str]  # they need no key
    probes: frozenset[str]
    forms: frozenset[str]  # whose bodies are forms
    admin: frozenset[str]
    information: frozenset[str]

    @classmethod
    def of_operations(cls, operations: Iterable[Operation]) -> "Paths":
        every = tuple(operations)
        return cls(
            frozenset(one.path for one in every if one.submits),
            frozenset(one.path for one in every if one.counts),
            frozenset(one.path for one in every if one.is_open),
            frozenset(one.path for one in every if one.is_probe),
            frozenset(one.path for one in every if one.is_form),
            frozenset(one.path for one in every if one.key_scope == ADMIN),
            frozenset(one.path for one in every if one.key_scope == ANY_KEY),
        )

    def scope_of(self, path: str) -> str:
        """What a key must be for to ask for this path; ANY_KEY: any key will do."""
        if path in self.admin:
            return ADMIN
        return ANY_KEY if path in self.information or path.startswith("/v1/models/") else INFERENCE
