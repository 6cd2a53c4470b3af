"""HTTP: the server, its connections, and the limits of every request."""
