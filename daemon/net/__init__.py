"""How machines reach each other: certificates, joining, the one port of a node, relays, what was proven to answer."""
