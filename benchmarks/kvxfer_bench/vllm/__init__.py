"""Benchmarks of vLLM: real servers, and its own scheduler with a forward pass that is played."""
