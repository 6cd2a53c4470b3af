"""Reads inputs from files and writes outputs to files. Both are streams: no file is in memory as a whole."""
