"""What the replicas of a stage add up and exchange: tensors and accounts, without links."""
