"""The daemon's side of its worker processes: their socket, goals and status."""
