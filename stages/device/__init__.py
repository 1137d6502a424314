"""The seam between a stage and the device that computes it."""
