"""A worker's records of its own work: operations, seconds, times of layers."""
