"""The modules that the programs in bench/ share.

A side is one way to run the model on the sequences.

- `workload` makes the sequences.
- `load` makes the sides that call an encserve server.
- `meter` reads the metrics of a server.
- `sides` makes the sides that run the model in this process.
- `rounds` runs the sides and computes ratios.
- `agreement` compares the results of the sides.
- `report` makes tables and checks targets.
- `command` has the command-line options of a comparison.
- `machine` describes the CPUs, and measures the load of other processes.
- `peers` and `programs` are for bench/peers.py.
- `plots` is for bench/scaling.py.
"""
