"""What ``kvxfer bench`` measures. Imported by the CLI alone."""
