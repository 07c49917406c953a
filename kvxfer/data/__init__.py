"""What moves the bytes: a data thread for each back end, the jobs that parts become, staging memory, checksums."""
