"""The store of all decisions, as its client sees it: transactions, leases, watches that resume."""
