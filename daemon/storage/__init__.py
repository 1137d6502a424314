"""Layer files: in the node's store and in checkpoints."""
