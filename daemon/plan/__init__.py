"""Plans which device holds which layers: what computing and sending cost, the search, and when a move pays."""
