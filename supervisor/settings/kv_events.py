"""--kv-events-config: where schedulers publish the events of their prefix caches, as vLLM's keys say. Called by resolve.py."""

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any, get_args

from msgspec.structs import replace

from meshlm.protocol.config import KVEventsConfig, MeshConfig
from meshlm.protocol.kv_events import Encoding, is_bound
from meshlm.supervisor.errors import UsageError, raised_as
from meshlm.supervisor.settings import placement
from meshlm.supervisor.settings.flag_rules import Facts
from meshlm.supervisor.settings.rules import Rules, check

FLAG = "--kv-events-config"
COUNTS = ("buffer_steps", "hwm", "max_queue_size")
TEXTS = ("endpoint", "replay_endpoint", "topic")
CHOICES: dict[str, tuple[str, ...]] = {"publisher": ("null", "zmq"), "encoding": get_args(Encoding)}
KEYS = ("enable_kv_cache_events", *CHOICES, *TEXTS, *COUNTS)
MOST = 1 << 30
LAST_PORT = 65_535
_TCP = re.compile(r"tcp://([^:/\s]+|\[[^\]\s]+\]):(\d{1,5})")


def settled(config: MeshConfig) -> MeshConfig:
    """The same settings with what the flag comes to. UsageError names the key that cannot be honoured."""
    text = config.kv_events.kv_events_config
    if not text:
        return config
    with raised_as(UsageError, ValueError, of=f"{FLAG} {text}"):
        given = json.loads(text)
    if not isinstance(given, dict):
        raise UsageError(f"{FLAG} {text}: a JSON object is expected")
    given = {key: value for key, value in given.items() if value is not None}
    check(_keys(given))
    found = {key: given[key] for key in KVEventsConfig.__struct_fields__ if key in given}
    found["enabled"] = bool(given.get("enable_kv_cache_events")) and given.get("publisher", "zmq") == "zmq"
    settings = replace(config.kv_events, **found)
    check(_addresses(settings, config))
    return replace(config, kv_events=settings)


def rules(c: MeshConfig, f: Facts, *, pools: bool) -> Rules:
    """What has no events. Of a settled configuration; pools: the model gives vectors."""
    if not c.kv_events.enabled:
        return
    yield not c.cache.enable_prefix_caching, FLAG, "no block is found again with --no-enable-prefix-caching"
    without = f.spec.encoder_only or f.spec.audio_encoder is not None
    yield without, FLAG, f"{f.spec.architecture} keeps no blocks that another request could use; leave it out"


def _keys(given: Mapping[str, Any]) -> Rules:
    for key, value in given.items():
        name = f"{FLAG}: {key} {json.dumps(value)}"
        close = difflib.get_close_matches(key, KEYS, n=1)
        yield key not in KEYS, f"{FLAG}: unknown key {key}" + (f"; did you mean {close[0]}?" if close else ""), ""
        yield key == "enable_kv_cache_events" and not isinstance(value, bool), name, "true or false is expected"
        if key in CHOICES:
            yield value not in CHOICES[key], name, f"there are {' and '.join(CHOICES[key])}"
        yield key in TEXTS and not isinstance(value, str), name, "a text is expected"
        is_count = type(value) is int and 1 <= value <= MOST
        yield key in COUNTS and not is_count, name, f"a whole number from 1 to {MOST} is expected"


def _addresses(events: KVEventsConfig, config: MeshConfig) -> Rules:
    """Each rank has a port of its own. They must be ports, and no two the same."""
    first = config.parallel.data_parallel_rank or 0
    num_ranks, here = config.parallel.data_parallel_size, len(placement.local_ranks(config)[0])
    ports: list[int] = []
    for key in ("endpoint", "replay_endpoint"):
        address = getattr(events, key)
        if (not address and key == "replay_endpoint") or re.fullmatch(r"ipc://\S+", address):
            continue
        name, tcp = f"{FLAG}: {key} {json.dumps(address)}", _TCP.fullmatch(address)
        yield tcp is None, name, 'an address is expected, as "tcp://*:5557" or "ipc:///some/path"'
        assert tcp is not None
        last = int(tcp[2]) + first + num_ranks - 1
        yield not int(tcp[2]) or last > LAST_PORT, name, f"ports are 1 to {LAST_PORT}, and ranks need them up to {last}"
        if key == "replay_endpoint" or is_bound(address):
            ports.append(int(tcp[2]))
    clash = len(ports) > 1 and abs(ports[0] - ports[1]) < here
    name = f"{FLAG}: replay_endpoint {json.dumps(events.replay_endpoint)}"
    why = (
        f"its ports, one for each of {here} ranks, are those of the endpoint {events.endpoint}; {here} apart is enough"
    )
    yield clash or (events.endpoint == events.replay_endpoint), name, why
