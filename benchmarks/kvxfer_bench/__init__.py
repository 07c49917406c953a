"""Benchmarks and long runs, one module a command of ``kvxfer bench``. Nothing that ships with an engine imports them."""
