"""What lies on disk and becomes a model: scan, bundle, loading, tuning, activation, and the manager of it all."""
