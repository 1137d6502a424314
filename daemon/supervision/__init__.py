"""The daemon's side of its workers: processes, their socket, orders and status."""
