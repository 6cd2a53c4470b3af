"""The encserve server: it loads model bundles and serves them over gRPC and HTTP. `app` lists the parts."""

import os

# NumPy reads this variable on import. Each batch has a thread, so further threads of NumPy would wait for a CPU.
# Joining 512 vectors on two busy CPUs took 25 ms with these further threads, and 10 ms without.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
