"""The contract between the exporter and the server: see `v1`."""
