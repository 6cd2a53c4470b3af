"""The command `encserve`: gets vectors from a server, inspects models, and measures throughput."""
