"""A process's sockets for its peers: its port, its TLS identity, its limits."""
