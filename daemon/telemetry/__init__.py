"""What a node measures and reports: goodput, layer times, progress, the ways to other nodes."""
