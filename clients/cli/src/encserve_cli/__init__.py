"""The command `encserve`: asks a server, looks into models, and measures."""
