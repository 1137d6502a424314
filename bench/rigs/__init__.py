"""What benches share: processes, emulated stages, measures."""
