"""The machine: clock, CPUs, memory, files, sockets."""
