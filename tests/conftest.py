"""What holds for all tests."""

import os
import socketserver

from hypothesis import HealthCheck, settings

# For torch, which is not loaded yet: other workers run other files beside this one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A test says what is right, never how fast: a busy machine makes any example slow.
settings.register_profile("local", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), max_examples=100)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# The server of the metrics page asks every half second whether it is to stop, and tests stop hundreds of them.
socketserver.BaseServer.serve_forever.__defaults__ = (0.01,)
