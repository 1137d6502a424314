"""What a process offers to its peers: its port, its TLS identity, its limits."""
