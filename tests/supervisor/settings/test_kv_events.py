"""--kv-events-config: vLLM's keys as one record, or one line that names what cannot be honoured."""

import json
from typing import Any

import msgspec
import pytest
from tiny_models import resolved_of, spec_of

from meshlm.protocol.config import CacheConfig, KVEventsConfig, MeshConfig, ParallelConfig
from meshlm.runtime import platforms
from meshlm.supervisor.api.arguments import settings_of
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.nodes import core
from meshlm.supervisor.settings import flag_rules, flags, kv_events, rules

ON: dict[str, Any] = {"enable_kv_cache_events": True}


def settled(given: Any, **parallel: Any) -> KVEventsConfig:
    text = given if isinstance(given, str) else json.dumps(given)
    config = MeshConfig(kv_events=KVEventsConfig(kv_events_config=text), parallel=ParallelConfig(**parallel))
    return kv_events.settled(config).kv_events


def test_the_defaults_are_vllms() -> None:
    assert kv_events.settled(MeshConfig()) == MeshConfig()
    found = settled(ON)
    assert found.enabled
    assert (found.endpoint, found.replay_endpoint, found.topic) == ("tcp://*:5557", "", "")
    assert (found.buffer_steps, found.hwm, found.max_queue_size) == (10_000, 100_000, 100_000)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (ON, True),
        ({**ON, "publisher": "zmq"}, True),
        ({**ON, "publisher": None}, True),
        ({**ON, "publisher": "null"}, False),
        ({"publisher": "zmq"}, False),
        ({}, False),
    ],
)
def test_who_publishes(given: dict[str, Any], expected: bool) -> None:
    assert settled(given).enabled is expected


def test_all_keys() -> None:
    given = {"endpoint": "tcp://router:5557", "replay_endpoint": "tcp://*:5558", "buffer_steps": 5, "hwm": 6}
    given |= {"max_queue_size": 7, "topic": "kv@pod@model", "encoding": "array"}
    found = settled({**ON, "publisher": "zmq", **given})
    assert {key: getattr(found, key) for key in given} == given


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("[1]", "a JSON object is expected"),
        ("{", "--kv-events-config {"),
        ({"end_point": "a"}, "unknown key end_point; did you mean endpoint?"),
        ({"enable_kv_cache_events": "yes"}, 'enable_kv_cache_events "yes": true or false is expected'),
        ({"publisher": "nats"}, 'publisher "nats": there are null and zmq'),
        ({"encoding": "json"}, 'encoding "json": there are map and array'),
        ({"topic": 5}, "topic 5: a text is expected"),
        ({"hwm": 0}, "hwm 0: a whole number from 1 to"),
        ({"buffer_steps": True}, "buffer_steps true: a whole number"),
        ({"max_queue_size": 1.5}, "max_queue_size 1.5: a whole number"),
        ({"endpoint": "inproc://kv"}, 'endpoint "inproc://kv": an address is expected'),
        ({"endpoint": "tcp://*"}, 'endpoint "tcp://*": an address is expected'),
        ({"endpoint": ""}, 'endpoint "": an address is expected'),
        ({"endpoint": "tcp://*:0"}, "ports are 1 to 65535"),
        ({"endpoint": "tcp://*:65535"}, "ports are 1 to 65535, and ranks need them up to 65536"),
        ({"replay_endpoint": "udp://*:1"}, 'replay_endpoint "udp://*:1": an address is expected'),
        ({"replay_endpoint": "tcp://*:5557"}, "are those of the endpoint"),
        ({"replay_endpoint": "tcp://*:5558"}, "2 apart is enough"),
        ({"endpoint": "ipc:///a", "replay_endpoint": "ipc:///a"}, "are those of the endpoint"),
    ],
)
def test_what_cannot_be_is_named(given: Any, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        settled({**ON, **given} if isinstance(given, dict) else given, data_parallel_size=2)
    assert text in str(caught.value)
    assert str(caught.value).startswith("--kv-events-config")
    assert "\n" not in str(caught.value)


def test_ports_that_do_not_meet() -> None:
    given = {**ON, "replay_endpoint": "tcp://*:5559"}
    assert settled(given, data_parallel_size=2).replay_endpoint == "tcp://*:5559"
    given = {**ON, "endpoint": "tcp://router:5557", "replay_endpoint": "tcp://*:5558"}
    assert settled(given, data_parallel_size=2).enabled, "the endpoint is another host's"


def test_the_python_api_takes_it_as_vllms_does() -> None:
    found = flags.build(settings_of({"kv_events_config": {**ON, "topic": "kv"}}), None)
    assert kv_events.settled(found).kv_events.topic == "kv"
    assert kv_events.settled(found).kv_events.enabled


def test_what_has_no_events() -> None:
    facts = flag_rules.Facts(spec_of(), platforms.named("cpu"))
    on = KVEventsConfig(enabled=True)
    rules.check(kv_events.rules(MeshConfig(kv_events=on), facts, pools=False))
    without = MeshConfig(kv_events=on, cache=CacheConfig(enable_prefix_caching=False))
    with pytest.raises(UsageError, match="no block is found again with --no-enable-prefix-caching"):
        rules.check(kv_events.rules(without, facts, pools=False))
    rules.check(kv_events.rules(MeshConfig(cache=without.cache), facts, pools=False))


def test_nodes_that_join_have_events_or_none_has() -> None:
    resolved = msgspec.structs.replace(resolved_of(spec_of()), load_format="dummy")
    with_events, elsewhere, without = (
        core.facts(MeshConfig(kv_events=one, resolved=resolved))
        for one in (KVEventsConfig(enabled=True), KVEventsConfig(enabled=True, endpoint="tcp://a:1"), KVEventsConfig())
    )
    assert core.differences(with_events, elsewhere) == ""
    told = core.differences(with_events, without)
    assert told == "--kv-events-config is enabled on the head and absent on the node"
