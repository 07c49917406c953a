"""Prefill in one process, decode in another, and proof that KV moved between them."""
