"""What every room stands on: errors, addresses, activities, the log, files, the terminal, fault points."""
