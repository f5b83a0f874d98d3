"""The media process's links, threads, files and clock.

Bytes are gathered in threads of this process, which reads no file itself: each item is made in a child of its sandbox (making.py), with
limits of memory and CPU time, so that a crafted file ends nothing but that child. The files lie in the mesh's folder of the host's
shared memory, named by their digest; a new incarnation finds those of the one before. Files that were not finished are removed.
"""

import contextlib
import hashlib
import importlib.util
import os
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct

from meshlm.mediaproc import fetch
from meshlm.mediaproc.addresses import Refused
from meshlm.mediaproc.core import MediaCore
from meshlm.mediaproc.events import (
    Drop,
    Effect,
    Event,
    Found,
    Gather,
    Gathered,
    Keep,
    Listed,
    Made,
    Make,
    Refusal,
    Skipped,
)
from meshlm.mediaproc.making import Order, Outcome, Settings
from meshlm.mediaproc.sampling import Sampling
from meshlm.mediaproc.video_limits import VideoLimits
from meshlm.protocol.audio import SAMPLE_RATE
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.counts import Counted, ProcessCounts
from meshlm.protocol.media import DIGEST_BYTES, Modality
from meshlm.protocol.wire.ids import COORDINATOR, ErrorKind, Identity, Incarnation
from meshlm.protocol.wire.parts import joined
from meshlm.runtime.errors import LinkDown, ProcessFatal
from meshlm.runtime.extras import how_to_install
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.process import in_hand
from meshlm.runtime.process.events import PeerLost, Received, Tick
from meshlm.runtime.process.process import App
from meshlm.runtime.process.readable import about
from meshlm.runtime.process.shared_memory import folder_of
from meshlm.runtime.sandbox.limits import MIB, ChildDied, Limits
from meshlm.runtime.sandbox.sandbox import NoChild, Sandbox, SandboxFailed

Work = Callable[[Gather | Make], Event]
GIB = 1 << 30
TICK_S = 1.0
LIST_TICKS = 10  # between two looks at the files that are there
PART = ".part"
OWNER = "run_dir"  # supervisor/processes/shared_folders.py reads it
NEEDED = {  # packages by what they are for, each with the extra that has it
    Modality.IMAGE: {"PIL": "media", "transformers": "media"},
    Modality.VIDEO: {"av": "audio", "PIL": "media", "transformers": "media"},
    Modality.AUDIO: {"av": "audio", "transformers": "media"},
}
NAMES = {Modality.IMAGE: "images", Modality.VIDEO: "videos", Modality.AUDIO: "sounds"}
NAMED_BY = ("processor_config.json", "preprocessor_config.json")
LIBRARY_BYTES = 1024 * MIB  # of address space: what the libraries and a processor take beside an image's pixels
BYTES_A_PIXEL = 16  # as decoded, converted, turned and resized
BYTES_A_SAMPLE = 64  # as decoded, joined, and as its share of a spectrogram
CPU_S, VIDEO_CPU_S, WALL_S = 30.0, 60.0, 120.0
CPU_SHARE = 0.05  # of one core: so much more for each second that a clip may have
TRIES = 2  # of a file whose child died for no reason of its own
NICENESS = 5  # texts go first
FETCH_THREADS, GATHER_THREADS, MOST_MAKE_THREADS = 16, 2, 4
FREE_SHARE = 0.9  # of the shared memory that is free at the start


class MediaApp(App):
    """The media process."""

    _mesh: Mesh  # from start() on, as the others below
    _folder: Path
    _sandbox: Sandbox
    _limits: dict[Modality, Limits]

    def __init__(self) -> None:
        self._core: MediaCore | None = None
        self._fetching = ThreadPoolExecutor(FETCH_THREADS, "fetch")
        self._gathering = ThreadPoolExecutor(GATHER_THREADS, "gather")
        self._at_once = max(1, min(MOST_MAKE_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._making = ThreadPoolExecutor(self._at_once, "make")
        self._early: list[tuple[Identity, Struct]] = []  # what peers said before start() ran
        self._told = ProcessCounts()  # to the coordinator
        self._ticks = 0

    async def start(self, mesh: Mesh) -> dict[str, str]:
        config = mesh.config
        if not config.has_media:
            raise ProcessFatal("the configuration has no media")
        self._mesh, self._folder = mesh, folder_of(config.run.run_dir)
        max_bytes = self._prepare_folder(config)
        self._limits = {one: _limits_of(one, config) for one in Modality}
        refusal = missing(config)
        self._sandbox = Sandbox("meshlm.mediaproc.making", msgspec.json.encode(_settings(config, max_bytes)), "media")
        if not refusal:
            self._sandbox.start()
        self._core = MediaCore(max_bytes, str(self._folder), refusal, self._at_once)
        self._do(Found(tuple(self._found())))
        for peer, message in self._early:
            self.on_message(peer, message)
        self._tick()
        return {
            "shared memory": f"{self._folder}, {max_bytes / GIB:.1f} GiB",
            **({"refuses": refusal} if refusal else {}),
        }

    def _prepare_folder(self, config: MeshConfig) -> int:
        """Makes the folder; the bytes that its files may have."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if self._folder.stat(follow_symlinks=False).st_uid != os.getuid():
                raise ProcessFatal(f"{self._folder} is another user's")
            (self._folder / OWNER).write_text(config.run.run_dir)
            free = shutil.disk_usage(self._folder).free + sum(size for _, size in self._found())
        except OSError as error:
            raise ProcessFatal(f"{self._folder}: {error.strerror}") from None
        wanted = int(config.media.mm_processor_cache_gb * GIB)
        if wanted > free * FREE_SHARE:
            self._mesh.log.warning(
                "shared memory is short", folder=str(self._folder), free_bytes=free, wanted_bytes=wanted
            )
        return min(wanted, int(free * FREE_SHARE))

    def _found(self) -> list[tuple[bytes, int]]:
        """The files of earlier incarnations. Unfinished ones are removed: whoever wrote them is gone."""
        for path in self._folder.glob(f"*{PART}"):
            path.unlink(missing_ok=True)
        return self._listed()

    def _listed(self) -> list[tuple[bytes, int]]:
        """Digest and bytes of each file; none where the folder is gone."""
        try:
            found = [entry for entry in os.scandir(self._folder) if len(entry.name) == 2 * DIGEST_BYTES]
            return [(bytes.fromhex(entry.name), entry.stat().st_size) for entry in found]
        except OSError:
            return []

    def _tick(self) -> None:
        self._mesh.call_later(TICK_S, self._tick)  # first: one that fails is not the last
        assert self._core is not None
        self._ticks += 1
        if self._ticks % LIST_TICKS == 0:
            self._do(Listed(frozenset(digest for digest, _ in self._listed())))
        self._do(Tick(time.time()))
        files, gauges = self._core.files, self._core.counts.gauges
        gauges["media_files"] = {"in_use": files.num_held, "kept": len(files) - files.num_held}
        gauges["media_waiting_for_room"] = {"": self._core.turns.num_waiting_for_room}
        gauges["media_bytes"], gauges["media_capacity_bytes"] = {"": files.num_bytes}, {"": files.max_bytes}
        if (told := self._core.counts.told()) != self._told:
            self._told = told
            self._send(COORDINATOR, Counted(told))

    def _now(self) -> float:
        return time.monotonic()

    def _do(self, event: Event) -> None:
        assert self._core is not None
        for effect in self._core.handle(event, self._now()):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Gather():
                pool = self._fetching if effect.source.url else self._gathering
                pool.submit(self._in_thread, self._gathered, effect)
            case Make():
                self._making.submit(self._in_thread, self._made, effect)
            case Keep():
                (self._folder / effect.part).rename(self._folder / effect.digest.hex())
            case Drop():
                (self._folder / effect.name).unlink(missing_ok=True)
            case _:
                self._send(effect.to, effect.message)

    def _in_thread(self, work: Work, effect: Gather | Make) -> None:
        """Does the work of an effect, and tells the core of it. What fails there is told, too: somebody waits."""
        assert self._core is not None
        if not self._core.is_wanted(effect.job):
            event: Event = Skipped(effect)
        else:
            try:
                event = in_hand.holding(f"media {effect.job}", work, effect)
            except Refused as error:
                event = _of(effect, error.refusal)
            except Exception as error:
                self._mesh.log.exception("the media process failed")
                event = _of(effect, Refusal(f"cannot be read: {type(error).__name__}", ErrorKind.INTERNAL))
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._mesh.call_soon_threadsafe(self._do, event)

    def _gathered(self, effect: Gather | Make) -> Event:
        assert isinstance(effect, Gather)
        source, config = effect.source, self._mesh.config.media
        data = fetch.data_of(source.url, config) if source.url else source.data
        if len(data) > config.max_media_bytes:
            raise fetch.too_large(len(data), config)
        key = hashlib.sha256(joined(source.modality.encode(), source.processor_kwargs_json, data)).digest()
        return Gathered(effect.job, data, key)

    def _made(self, effect: Gather | Make) -> Event:
        assert isinstance(effect, Make)
        part = f"{secrets.token_hex(16)}{PART}"
        order = Order(
            effect.source.modality, effect.data, str(self._folder / part), effect.source.processor_kwargs_json
        )
        try:
            outcome = self._outcome(order)
        except BaseException:
            (self._folder / part).unlink(missing_ok=True)
            raise
        if outcome.item is None:
            (self._folder / part).unlink(missing_ok=True)
        return Made(effect.job, outcome.item, outcome.num_bytes, part, outcome.refusal)

    def _outcome(self, order: Order) -> Outcome:
        """What a child makes of it. Refused."""
        job, modality = msgspec.msgpack.encode(order), order.modality
        for tried in range(1, TRIES + 1):
            try:
                answer = self._sandbox.run(job, self._limits[modality], WALL_S)
                return msgspec.msgpack.decode(answer, type=Outcome)
            except ChildDied as died:
                if died.is_of_the_job or tried == TRIES:
                    raise Refused(Refusal(f"the {modality} cannot be decoded: {died.message}")) from None
            except NoChild as failed:
                if tried == TRIES:
                    raise Refused(Refusal(f"{failed}; try again", ErrorKind.OVERLOADED)) from None
            except SandboxFailed as failed:
                self._mesh.log.error("an item could not be made ready", modality=modality.value, reason=str(failed))
                raise Refused(
                    Refusal(f"the {modality} cannot be made ready for the model", ErrorKind.INTERNAL)
                ) from None
        raise AssertionError("it was tried")

    def _send(self, to: Identity, message: Struct) -> None:
        try:
            self._mesh.send(to, message)
        except LinkDown:  # whoever is lost asks again
            self._mesh.log.debug("not delivered", to=str(to), **about(message))

    def on_message(self, peer: Identity, message: Struct) -> None:
        if self._core is None:
            self._early.append((peer, message))
            return
        self._do(Received(peer, self._mesh.incarnation_of(peer), message))

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        if peer == COORDINATOR:
            self._told = ProcessCounts()

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        self._early = [(sender, message) for sender, message in self._early if sender != peer]
        if self._core is not None:
            self._do(PeerLost(peer, incarnation))

    def beat(self) -> tuple[int, str]:
        if self._core is None:
            return 0, "starting"
        return self._ticks, f"{len(self._core.files)} items"

    def num_requests(self) -> int:
        return len(self._core.asked) if self._core is not None else 0

    async def stop(self) -> None:
        for pool in (self._fetching, self._gathering, self._making):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._core is not None:
            self._sandbox.close()


def _of(effect: Gather | Make, refusal: Refusal) -> Event:
    """The event by which such an effect failed."""
    if isinstance(effect, Gather):
        return Gathered(effect.job, refusal=refusal)
    return Made(effect.job, refusal=refusal)


def _limits_of(modality: Modality, config: MeshConfig) -> Limits:
    """Of the child that makes an item."""
    media, cpu_s = config.media, CPU_S
    content = BYTES_A_PIXEL * media.max_image_pixels
    if modality is Modality.VIDEO:
        content += BYTES_A_PIXEL * media.max_video_pixels
        cpu_s = VIDEO_CPU_S
    if modality is Modality.AUDIO:
        content = BYTES_A_SAMPLE * SAMPLE_RATE * config.server.max_audio_seconds
        cpu_s += CPU_SHARE * config.server.max_audio_seconds
    memory = LIBRARY_BYTES + content + 2 * media.max_media_bytes
    return Limits(cpu_s=cpu_s, memory_bytes=memory, stack_bytes=8 * MIB, niceness=NICENESS)


def missing(config: MeshConfig) -> str:
    """Why this server reads no images, videos and sounds; "" where it does."""
    resolved = config.require_resolved()
    assert resolved.spec.media is not None
    needed = {name: extra for one in resolved.spec.media.modalities for name, extra in NEEDED[one].items()}
    if lacking := [name for name in needed if importlib.util.find_spec(name) is None]:
        what = " and ".join(NAMES[one] for one in resolved.spec.media.modalities)
        how = "; ".join(how_to_install(extra) for extra in sorted({needed[name] for name in lacking}))
        return f"{what} need packages that are not installed at the server ({', '.join(lacking)}): {how}"
    folder = Path(resolved.model_path)
    if not any((folder / name).exists() for name in NAMED_BY):
        return f"the model has no {' or '.join(NAMED_BY)}, which says how its media are made ready"
    return ""


def _settings(config: MeshConfig, max_file_bytes: int) -> Settings:
    resolved, media = config.require_resolved(), config.media
    assert resolved.spec.media is not None
    kwargs = msgspec.json.decode(media.mm_processor_kwargs)
    options = media.io_options("video")
    asked = {name: options[name] for name in ("num_frames", "fps") if name in options}
    return Settings(
        folder=resolved.model_path,
        spec=resolved.spec.media,
        kwargs=kwargs,
        background=media.background,
        max_pixels=media.max_image_pixels,
        max_audio_seconds=config.server.max_audio_seconds,
        max_file_bytes=max_file_bytes,
        max_model_len=resolved.max_model_len,
        video=VideoLimits(
            media.max_video_seconds, media.max_video_frames, media.max_video_pixels, media.max_image_pixels
        ),
        sampling=Sampling(**asked, is_given=bool(asked)),
    )
