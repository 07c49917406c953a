"""A prefill and a decode server on this machine, and proof that KV moved between them. Imports no engine."""
