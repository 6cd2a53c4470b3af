"""One file or folder for each protocol. Protocols do not use sockets or the libraries of transports."""
