"""For tests: an in-process back end, fault injection, and the suite that proves a back end."""
