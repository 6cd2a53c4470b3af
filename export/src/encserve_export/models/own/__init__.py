"""Our own encoder: its configuration, the module, the layouts that it reads, and its graphs."""
