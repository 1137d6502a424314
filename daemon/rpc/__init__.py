"""Calls between daemons: certificates, clients, byte streams, file transfers, a rate limit."""
