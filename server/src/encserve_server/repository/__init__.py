"""From a folder on disk to a served model: scan, bundle, loading, tuning, activation, and the manager."""
