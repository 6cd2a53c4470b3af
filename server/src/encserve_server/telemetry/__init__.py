"""What the server says about its work: metrics, log lines, spans."""
