"""Frames between neighbouring stages, and their transports: one Protocol, one package per transport."""
