"""HTTP: the listening server, the routes of two protocols, JSON to calls and back, errors to statuses."""
