"""The settings of images in prompts: what they cannot be, and whether those of this model can be served. Called by resolve.py."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.media import Modality
from meshlm.runtime.extras import how_to_install
from meshlm.runtime.model_files.model_files import ModelFiles
from meshlm.supervisor.settings.flag_rules import Facts
from meshlm.supervisor.settings.rules import Rules

IO_OPTIONS = {"image": ("rgba_background_color",), "video": ("num_frames", "fps")}


def settled(config: MeshConfig, files: ModelFiles) -> tuple[ModelFiles, list[str]]:
    """The files of a model that takes only what its workers can encode, and what to tell the user."""
    why = _why_blind(config, files)
    if files.spec.media is None:
        return files, []
    if not why:
        return _without_packages(files)
    return replace(files, spec=replace(files.spec, media=None)), [f"{files.path}: images are refused: {why}"]


def _without_packages(files: ModelFiles) -> tuple[ModelFiles, list[str]]:
    """Videos are read by PyAV."""
    media = files.spec.media
    if media is None or Modality.VIDEO not in media.modalities or find_spec("av") is not None:
        return files, []
    left = tuple(one for one in media.placeholders if one[0] is not Modality.VIDEO)
    spec = replace(files.spec, media=replace(media, placeholders=left))
    return replace(files, spec=spec), [f"{files.path}: videos are refused: {how_to_install('audio')}"]


def _why_blind(config: MeshConfig, files: ModelFiles) -> str:
    """Empty: they can be served."""
    if config.worker.device == "fake":
        return ""
    if config.parallel.pipeline_parallel_size > 1:
        return "the stages of a pipeline have no encoder; use --tensor-parallel-size"
    if files.load_format == "sharded_state":
        return "--load-format sharded_state has no weights of an encoder"
    if find_spec("transformers") is None:
        return "the transformers package, whose encoders compute them, is not installed"
    return ""


def rules(c: MeshConfig, f: Facts, *, pools: bool) -> Rules:
    """pools: the server is to give vectors."""
    m = c.media
    try:
        limits, why = m.limits, ""
    except (ValueError, KeyError, TypeError) as error:
        limits, why = {}, f'must be JSON as {{"image": 4}}, or image=4: {error}'
    yield why, "--limit-mm-per-prompt", why
    for name, number in limits.items():
        yield name not in list(Modality), f"--limit-mm-per-prompt: {name}", f"unknown; {', '.join(Modality)} are known"
        yield number < 0, f"--limit-mm-per-prompt: {name} {number}", "a number from 0 on"
    kwargs, why = _object(m.mm_processor_kwargs)
    yield why, "--mm-processor-kwargs", why
    media_io, why = _object(m.media_io_kwargs)
    yield why, "--media-io-kwargs", why
    for name, options in media_io.items():
        yield name not in IO_OPTIONS, f"--media-io-kwargs: {name}", f"only {' and '.join(IO_OPTIONS)} are known"
        yield not isinstance(options, dict), f"--media-io-kwargs: {name}", "must be an object"
        for option in options if isinstance(options, dict) else ():
            known = IO_OPTIONS.get(name, ())
            yield option not in known, f"--media-io-kwargs: {name}.{option}", f"only {' and '.join(known)} are known"
    yield not _is_sampling(media_io), "--media-io-kwargs", "num_frames and fps of video must be numbers above 0, or -1"
    yield not _is_color(media_io), "--media-io-kwargs", "rgba_background_color must be three numbers from 0 to 255"
    path = m.allowed_local_media_path
    yield path and not Path(path).is_dir(), f"--allowed-local-media-path {path}", "there is no such folder"
    sees = f.spec.media is not None and any(m.limit_of(one) for one in f.spec.media.modalities)
    yield (
        sees and c.parallel.nnodes > 1,
        "--nnodes",
        "images lie in one host's memory; use one host, or --language-model-only",
    )
    yield kwargs and not sees, "--mm-processor-kwargs", "this model takes no images; leave it out"


def _object(given: str) -> tuple[dict[str, Any], str]:
    """A JSON object, or why it is none."""
    try:
        return msgspec.json.decode(given, type=dict[str, Any]), ""
    except msgspec.DecodeError as error:
        return {}, f"must be a JSON object: {error}"


def _is_sampling(media_io: dict[str, Any]) -> bool:
    given = _options(media_io, "video")
    return isinstance(given.get("num_frames", 1), int) and all(
        type(one) in (int, float) and (one > 0 or one == -1) for one in given.values()
    )


def _options(media_io: dict[str, Any], modality: str) -> dict[str, Any]:
    found = media_io.get(modality)
    return found if isinstance(found, dict) else {}


def _is_color(media_io: dict[str, Any]) -> bool:
    given = _options(media_io, "image").get("rgba_background_color", [0, 0, 0])
    return isinstance(given, list) and len(given) == 3 and all(type(one) is int and 0 <= one <= 255 for one in given)
