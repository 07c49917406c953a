"""A demo that prefills in one process, decodes in another, and proves that KV moved between them."""
