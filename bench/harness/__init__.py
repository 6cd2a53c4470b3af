"""Shared by the programs of this folder.

workload: the sequences; load: encserve servers under load; sides: the same model in this process; rounds: order and
ratios; agreement: whether all sides compute the same; report: figures, targets and tables; command: options and the
report of a comparison; machine: the CPUs and other work on them. peers and programs serve bench/peers.py, plots serves
bench/scaling.py.
"""
