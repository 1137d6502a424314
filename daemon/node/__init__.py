"""The daemon of one node: its settings, its life, its membership, and its work on plans."""
