"""What neighbouring stages say to each other, and how: one Protocol, one package per transport."""
