"""What is told about the server: metrics, log lines, spans."""
