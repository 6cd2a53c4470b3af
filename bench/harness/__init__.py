"""The modules that the programs in bench/ share.

workload makes the sequences. A side is one way to run the model on the sequences: load makes the sides of an encserve
server, sides makes the sides in this process. rounds runs the sides and computes ratios. agreement compares results.
report makes tables and checks targets. command has the options of a comparison. machine describes the CPUs and finds
the load of other processes. peers and programs are for bench/peers.py, and plots is for bench/scaling.py.
"""
