"""Layer files: in the node's store, between nodes, and in checkpoints."""
