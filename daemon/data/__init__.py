"""Text to token shards, and where a node finds them."""
