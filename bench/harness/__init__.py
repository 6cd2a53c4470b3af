"""What the commands of this folder share.

workload: what is asked; load: encserve servers and their callers; sides: the same model in this process; rounds: in
which order, and ratios; report: figures, targets and tables; agreement: whether all compute the same; machine: what it
is, and whether it was quiet. peers and programs are for bench/peers.py, plots for bench/scaling.py.
"""
