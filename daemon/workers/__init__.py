"""The daemon's side of its worker processes: their socket, orders and status."""
