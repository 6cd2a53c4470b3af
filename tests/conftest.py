"""Settings for all tests, and the option `--tier` of pytest.

Each test belongs to one tier: `fast`, `system` or `weekly`. `pytest --tier system tests/server` runs the tests of one
tier in a folder. Without `--tier` all tests run.

A marker on a test, or on the file of the test, sets the tier. Without a marker, FOLDERS gives the tier of a folder. All
other tests are fast.
"""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TIERS = {
    "fast": "tests of `make test`: no process is started, and each test takes under two seconds",
    "system": "tests of `make test-system`: they start processes, or take seconds",
    "weekly": "tests of `make test-weekly`: they take minutes, or bound memory and latencies",
}
FOLDERS = {"bulk": "system", "e2e": "system", "hostile": "weekly", "judges": "system", "operate": "system"}

# PyTorch must use one thread, because two test runs may share two CPUs. PyTorch reads this variable when it is
# imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background commands, such as `make test &`, with SIGINT ignored. Programs that tests start would
# inherit this, and tests of Ctrl-C would fail.
signal.signal(signal.SIGINT, signal.default_int_handler)

# All servers of a test run share one cache of weights. The cache is a temporary folder outside the home directory.
if "ENCSERVE_CACHE_DIR" not in os.environ:
    os.environ["ENCSERVE_CACHE_DIR"] = tempfile.mkdtemp(prefix="encserve-cache-")
    atexit.register(shutil.rmtree, os.environ["ENCSERVE_CACHE_DIR"], ignore_errors=True)

# Hypothesis sets no deadline for an example, because a busy machine makes any example slow.
settings.register_profile("local", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), max_examples=100)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=list(TIERS), help="run the tests of this tier only")


def pytest_configure(config: pytest.Config) -> None:
    for tier, description in TIERS.items():
        config.addinivalue_line("markers", f"{tier}: {description}")


def tier_of(test: pytest.Item) -> str:
    """Return the tier of a test: the tier of its nearest marker, else the tier in FOLDERS, else fast."""
    for marker in test.iter_markers():
        if marker.name in TIERS:
            return marker.name
    folder = test.path.relative_to(Path(__file__).parent).parts[0]
    return FOLDERS.get(folder, "fast")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """If `--tier` is given, deselect the tests of the other tiers."""
    tier = config.getoption("--tier")
    if tier is None:
        return
    config.hook.pytest_deselected(items=[test for test in items if tier_of(test) != tier])
    items[:] = [test for test in items if tier_of(test) == tier]


@pytest.fixture(scope="module", autouse=True)
def _frozen_libraries() -> None:
    """Exclude the objects of libraries and test modules from garbage collection, also of those imported since.

    A server makes a full collection when it starts and when it unloads a model, and an export makes one too. With the
    objects of transformers, a collection takes 0.2 s.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """With `--tier`, exit successfully even if no collected test belongs to the tier."""
    if session.config.getoption("--tier") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
