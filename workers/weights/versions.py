"""Which version of the weights a worker has, and how it gets another. Used by the stepper thread; no torch.

The coordinator writes the mesh's version into the run directory before any worker is asked to have it. So a worker that begins reads
the right weights at once; where it cannot see that file (on another node) it learns the version from the first Reset, and reads them
into the model that is there. What cannot be read any more leaves the worker with what it has, and it says why.
"""

from pathlib import Path
from typing import Protocol

import structlog
from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig, ModelConfig, Resolved
from meshlm.protocol.model import ModelSpec
from meshlm.protocol.weights import UNKNOWN, WeightsVersion
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files import manifest
from meshlm.runtime.model_files.digest import digest_of

_log = structlog.get_logger()


class HasWeights(Protocol):
    """The part of an engine that changes its weights (see `Engine`)."""

    def check_weights(self, resolved: Resolved) -> str: ...

    def load_weights(self, resolved: Resolved) -> None: ...

    def sum_weights(self) -> str: ...


class WeightsRefused(Exception):
    """These weights cannot be had here, and why."""


class WorkerWeights:
    """`version`: what this worker has. `behind`: why it does not have what it was last asked for."""

    def __init__(self, config: MeshConfig) -> None:
        self.start = config.require_resolved().weights
        self.version, self.behind = self.start, ""
        self._config = config

    def to_begin_with(self, asked: WeightsVersion | None) -> MeshConfig:
        """The configuration with which the engine is made. asked: by a Reset; None: as the run directory says."""
        wanted = asked or manifest.version(Path(self._config.run.run_dir)) or self.start
        for one in (wanted, self.start):
            try:
                found = self._readable(one)
            except WeightsRefused as error:
                self.behind = self.behind or str(error)
            else:
                self.version = one
                return replace(self._config, resolved=found)
        self.version = WeightsVersion(UNKNOWN, "unknown", self.start.source)
        return self._config

    def change(self, engine: HasWeights, wanted: WeightsVersion) -> None:
        """Have these weights, if they can be had. ProcessFatal once tensors have been changed."""
        self.behind = ""
        wanted = wanted if wanted.number else replace(self.start, name=wanted.name)
        if wanted.holds_same(self.version):
            self.version = wanted
            return
        try:
            found = self._readable(wanted)
            if why := engine.check_weights(found):
                raise WeightsRefused(why)
        except WeightsRefused as error:
            self.behind = str(error)
            _log.warning("weights cannot be read", weights=wanted.label, reason=self.behind)
            return
        engine.load_weights(found)
        self.version = wanted
        _log.info("weights", version=wanted.label, source=wanted.source)

    def check(self, engine: HasWeights, source: str) -> str:
        """The digest of the files there, once all of them were found to be good. WeightsRefused."""
        found = self._resolved(source)
        digest = _digest(source)
        if why := engine.check_weights(found):
            raise WeightsRefused(why)
        if _digest(source) != digest:
            raise WeightsRefused(f"{source}: its files are being written")
        return digest

    def _readable(self, version: WeightsVersion) -> Resolved:
        """WeightsRefused where the source is not what it was."""
        resolved = self._config.require_resolved()
        if version.in_memory:
            text = (
                f"weights {version.label} were changed in the memory of workers alone; update the weights from a folder"
            )
            raise WeightsRefused(text)
        if version.digest and _digest(version.source) != version.digest:
            raise WeightsRefused(f"{version.source}: its files are no longer those of weights {version.label}")
        return resolved if version.source == resolved.model_path else self._resolved(version.source)

    def _resolved(self, source: str) -> Resolved:
        """The model with its weights from there. WeightsRefused where that is another model."""
        resolved, asked = self._config.require_resolved(), self._config.model
        load_format = "auto" if resolved.load_format == "dummy" else resolved.load_format
        if resolved.load_format == "sharded_state" or resolved.weights_url:
            raise WeightsRefused("weights are updated from safetensors, .gguf and .bin files on a disk")
        flags = ModelConfig(
            model=source, load_format=load_format, hf_overrides=asked.hf_overrides, model_impl=asked.model_impl
        )
        from meshlm.runtime.model_files.model_files import resolve_model  # descriptions of models, which no start needs

        try:
            found = resolve_model(flags)
        except ModelFilesError as error:
            raise WeightsRefused(str(error)) from None
        if changed := _differences(found.spec, resolved.spec):
            raise WeightsRefused(f"{source}: its files describe another model than at the start ({', '.join(changed)})")
        drafter = resolved.drafter
        if drafter is not None and drafter.model_path == resolved.model_path:  # layers of the same files
            drafter = replace(drafter, model_path=str(found.path))
        return replace(resolved, model_path=str(found.path), load_format=found.load_format, drafter=drafter)


def _differences(found: ModelSpec, spec: ModelSpec) -> list[str]:
    """Names of what the two models do not have in common."""
    if spec.quantization is not None and any(scheme.online for scheme in spec.quantization.schemes):
        found = replace(found, quantization=spec.quantization)
    return [name for name in spec.__struct_fields__ if getattr(found, name) != getattr(spec, name)]


def _digest(source: str) -> str:
    try:
        return digest_of(source)
    except OSError as error:
        raise WeightsRefused(f"{source}: {error.strerror}") from None
