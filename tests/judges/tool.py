"""Runs the lines that a page shows for a tool, as they stand but for the address, each block on its own.

Reads the file of requests, JSON with `texts`, which the lines find as `texts`, and the files of the blocks; writes the
`vectors` or `similarities` that block i makes into BLOCK.npy.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

requests_file, *blocks = map(Path, sys.argv[1:])
for block in blocks:
    names: dict[str, Any] = json.loads(requests_file.read_text(encoding="utf-8"))
    exec(compile(block.read_text(encoding="utf-8"), block, "exec"), names)  # noqa: S102 - what it is for
    np.save(block.with_suffix(".npy"), np.array(names["vectors"] if "vectors" in names else names["similarities"]))
