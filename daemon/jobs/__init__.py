"""What a job is, how its file is read, and which jobs are refused."""
