"""The machine: clock, CPUs, memory."""
