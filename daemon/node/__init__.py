"""The daemon's life: settings, identity, registration, membership, which peers live."""
