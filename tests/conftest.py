"""What holds for all tests."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from spes_swarm.base import log

# The time that an example takes depends more on the load of the machine than on the code.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# CI runs the same examples each time; elsewhere each run explores new ones.
settings.register_profile("reproducible", settings.get_profile("explore"), derandomize=True)
settings.load_profile("explore")

# After `nohup`, SIGHUP is ignored, and children inherit that: no peer of these tests would stop at one. With a handler,
# it has no effect here, and its default effect in programs that are started; pytest-xdist's workers are such programs.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN or "PYTEST_XDIST_WORKER" in os.environ:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what needs a CUDA device on machines without one; torch is loaded only if something does.

    No test's errors name the log of an earlier test, as they would in one process.
    """
    setattr(log, "_path", None)  # noqa: B010 - it is private
    if item.get_closest_marker("cuda") is not None and not importlib.import_module("torch").cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that start several peers first, those with the most such tests before the others.

    They take longest and mostly wait. With files handed out to processes in this order, none of them is left for the
    end, when one process would wait for it alone.
    """
    swarms = Counter(item.path for item in items if item.get_closest_marker("swarm") is not None)
    items.sort(key=lambda item: -swarms[item.path])


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All peers of a session share one tokenised corpus, outside the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(autouse=True)
def _hivemind_gets_its_clock_back() -> Iterator[None]:
    """Whoever joins a DHT gives hivemind the swarm's time, for as long as its process lives: here for one test."""
    yield
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "hivemind" and hasattr(module, "get_dht_time"):
            vars(module)["get_dht_time"] = time.time
