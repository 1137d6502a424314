"""What a layer is at a boundary: weights, optimizer state, journal, and their files."""
