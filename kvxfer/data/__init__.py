"""What runs on the data threads, and how the control thread speaks to them: back ends, jobs, staging memory, checks.

Nothing here knows digests or deadlines of transfers.
"""
