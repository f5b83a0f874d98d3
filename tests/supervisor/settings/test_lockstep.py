"""Which meshes may have ranks that step together."""

from pathlib import Path

import pytest

from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, resolve


@pytest.mark.parametrize(
    ("more", "text"), [({"device": "cpu"}, "needs --device fake"), ({"pipeline_parallel_size": 2}, "no pipeline")]
)
def test_what_cannot_is_refused(smollm2: Path, more: dict[str, object], text: str) -> None:
    settings = {"model": str(smollm2), "device": "fake", "fake_lockstep": True, **more}
    with pytest.raises(UsageError, match=f"--fake-lockstep.*{text}"):
        resolve.resolve(flags.build(settings, None))


def test_dense_ranks_do_not_and_the_fake_ones_may(smollm2: Path) -> None:
    for wanted in (False, True):
        settings: dict[str, object] = {"model": str(smollm2), "device": "fake", "fake_lockstep": wanted}
        assert resolve.resolve(flags.build(settings, None)).lockstep is wanted
