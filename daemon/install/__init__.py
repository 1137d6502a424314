"""The daemon as a service of systemd: what to write and to run, and doing it."""
