"""What the coordinator knows about one job: boundaries, losses, deadlines, the plans that it could have."""
