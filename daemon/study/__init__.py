"""Studies: one job under several optimizers, treatments, rates and seeds, in single processes."""
