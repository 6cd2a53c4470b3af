"""The contract between the exporter and the server: the manifest of a model bundle."""
