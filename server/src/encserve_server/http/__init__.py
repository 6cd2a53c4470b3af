"""HTTP: the listening server, the routes of its protocols, JSON to calls and back, errors to statuses."""
