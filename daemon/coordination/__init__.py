"""What happens to jobs: the coordinator's one table, its conditions and its actions, who gets which devices."""
