"""Settings for all tests, and their tiers.

Each test is of one tier: `fast`, `system` or `weekly`. `pytest --tier system tests/server` runs one tier of a folder;
without `--tier` all tests run. A marker on a test decides, then a marker on its file, then FOLDERS; the rest is fast.
"""

import atexit
import os
import shutil
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

# torch reads this when it is imported. Two suites share two CPUs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The servers of this run share weights in one folder, outside the home directory.
if "ENCSERVE_CACHE_DIR" not in os.environ:
    os.environ["ENCSERVE_CACHE_DIR"] = tempfile.mkdtemp(prefix="encserve-cache-")
    atexit.register(shutil.rmtree, os.environ["ENCSERVE_CACHE_DIR"], ignore_errors=True)

# No deadline for an example: a busy machine makes any example slow.
settings.register_profile("local", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), max_examples=100)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=list(TIERS), help="run the tests of this tier only")


def pytest_configure(config: pytest.Config) -> None:
    for tier, description in TIERS.items():
        config.addinivalue_line("markers", f"{tier}: {description}")


def tier_of(test: pytest.Item) -> str:
    """The tier of a test: the marker nearest to it, or that of its folder."""
    for marker in test.iter_markers():
        if marker.name in TIERS:
            return marker.name
    folder = test.path.relative_to(Path(__file__).parent).parts[0]
    return FOLDERS.get(folder, "fast")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of `--tier`."""
    tier = config.getoption("--tier")
    if tier is None:
        return
    config.hook.pytest_deselected(items=[test for test in items if tier_of(test) != tier])
    items[:] = [test for test in items if tier_of(test) == tier]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A folder without tests of a tier is not a failure."""
    if session.config.getoption("--tier") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
