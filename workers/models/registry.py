"""The module that computes a model, by its architecture. Families name it (architectures/family.py)."""

from importlib import import_module

from meshlm.architectures.registry import architectures, family_of
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.models.decoder import Decoder


def model_class(spec: ModelSpec) -> type[Decoder]:
    """The module for this architecture. ProcessFatal lists those that exist."""
    family = family_of(spec.architecture)
    if family is None:
        known = ", ".join(sorted(architectures()))
        raise ProcessFatal(f"architecture {spec.architecture} is not supported; supported: {known}")
    module, _, name = family.model.partition(":")
    found: type[Decoder] = getattr(import_module(module), name)
    return found
