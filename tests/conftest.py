"""What holds for all tests."""

import atexit
import os
import shutil
import tempfile

from hypothesis import HealthCheck, settings

# For torch, which is not loaded yet: other workers run other files beside this one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Servers share weights in one folder of this run, which workers inherit, and not in the home directory.
if "ENCSERVE_CACHE_DIR" not in os.environ:
    os.environ["ENCSERVE_CACHE_DIR"] = tempfile.mkdtemp(prefix="encserve-cache-")
    atexit.register(shutil.rmtree, os.environ["ENCSERVE_CACHE_DIR"], ignore_errors=True)

# A test says what is right, never how fast: a busy machine makes any example slow.
settings.register_profile("local", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), max_examples=100)
settings.load_profile("ci" if os.environ.get("CI") else "local")
