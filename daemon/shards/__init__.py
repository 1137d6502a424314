"""A job's token shards on a node: found, fetched, verified, and served to others."""
