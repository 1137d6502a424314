"""`headway plan`: plans for nodes of a file or a cluster, simulated before anything runs."""
