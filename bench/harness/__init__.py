"""The modules that the programs of this folder share.

workload: the sequences; load: encserve servers under load; sides: the same model in this process; rounds: order and
ratios; agreement: comparison of the sides' results; report: numbers, targets and tables; command: options and the
report of a comparison; machine: the CPUs and other processes. bench/peers.py uses peers and programs, and
bench/scaling.py uses plots.
"""
