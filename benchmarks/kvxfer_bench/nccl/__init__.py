"""What two GPUs do at best with packed pieces, and ``kvxfer bench pieces``."""
