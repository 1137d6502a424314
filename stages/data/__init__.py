"""Token shards: written, read, and the built-in corpus."""
