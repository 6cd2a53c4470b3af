"""One file or folder for each protocol. Protocols know neither sockets nor the libraries of transports."""
