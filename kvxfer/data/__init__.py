"""The data threads, and how the control thread commands them: back ends, jobs, staging memory, checks.

Nothing here knows the digests or deadlines of transfers.
"""
