"""bench/long_texts.py: that it sees what an export and a server take."""

import re

import long_texts
import pytest

pytestmark = pytest.mark.weekly

SMALL = ["--tokens", "1100", "--layers", "1", "--width", "64", "--heads", "4", "--callers", "2"]


def test_it_says_what_comes_on_top_of_the_weights_and_refuses_too_much(capfd: pytest.CaptureFixture[str]) -> None:
    long_texts.main(SMALL)
    found = [float(it) for it in re.findall(r"([0-9.]+) GB beyond weights of 0.01", capfd.readouterr().out)]
    assert len(found) == 3
    assert all(0.05 < it < 1 for it in found)  # Python and what it imports, at least
    with pytest.raises(SystemExit, match=r"not met: 0\.\d\d GB beyond the weights; 0.01 are allowed"):
        long_texts.main([*SMALL, "--gigabytes", "0.01"])
