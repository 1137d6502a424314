"""The daemon's life: settings, identity, registration, membership, and whether peers are alive."""
