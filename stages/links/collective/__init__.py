"""The link over process groups of torch.distributed, for workers of one site."""
