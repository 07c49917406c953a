"""Benchmarks of vLLM: real servers, and its own scheduler with a simulated forward pass."""
