"""Turns text into token shards, and finds them for a node."""
