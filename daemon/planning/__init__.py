"""Plans which device holds which layers: the search for a plan, and when a better one is worth a move."""
