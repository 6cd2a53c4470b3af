"""Send lines of standard input to two servers in turn. Give IP addresses, not names.

    python two_servers.py 127.0.0.1:50051 127.0.0.1:50052

If you stop one server, the other server answers all calls.
"""

import sys

from encserve_client import EncoderClient

with EncoderClient(sys.argv[1:]) as client:
    for line in sys.stdin:
        vector = client.embed(line.rstrip())
        print(vector.shape, flush=True)
