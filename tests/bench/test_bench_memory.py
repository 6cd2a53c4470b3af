"""bench/memory.py: that it sees what servers take together, and refuses too much."""

import re

import memory
import pytest

pytestmark = pytest.mark.weekly

SMALL = ["--servers", "2", "--layers", "2", "--width", "512", "--heads", "4", "--calls", "4"]


def test_servers_that_share_weights_take_less(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"not met: \d+ MiB together; \d+ are allowed"):
        memory.main([*SMALL, "--mib", "1"])
    together = re.findall(r"^\| (each its own|shared) \| (\d+) \|", capfd.readouterr().out, flags=re.MULTILINE)
    assert [what for what, _ in together] == ["each its own", "shared"]
    assert int(together[1][1]) < int(together[0][1])
