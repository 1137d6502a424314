"""The state of a layer at a boundary: weights, optimizer state, journal, and their files."""
