"""What a daemon is: its settings, its life, its membership, and what it does about the plans."""
