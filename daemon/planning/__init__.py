"""Plans which device holds which layers: costs, cuts, orders of devices. Pure."""
