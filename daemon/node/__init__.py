"""The daemon's life: settings, identity, membership, and what it answers."""
