"""Which ports of other nodes this node can reach."""
