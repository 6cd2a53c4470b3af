"""The routes of the exporter: each module turns one type of source into a bundle."""
