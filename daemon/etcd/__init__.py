"""The client of the store of all decisions: transactions, leases, watches that resume."""
