"""Layer files and token shards on a node and in checkpoints: kept, fetched from others, verified."""
