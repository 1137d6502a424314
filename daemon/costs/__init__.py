"""What computing and sending cost on this cluster: layers, stages, connections, distance."""
