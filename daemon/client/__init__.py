"""What people ask of a cluster, and how the answers look."""
