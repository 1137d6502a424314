"""Estimates the cost of computing and sending on this cluster: layers, stages, connections, distance."""
