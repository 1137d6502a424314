"""How daemons talk to each other: certificates, clients, byte streams, file transfers, a rate limit."""
