"""Texts out of files, and what becomes of them into files, as streams: neither is ever held as a whole."""
