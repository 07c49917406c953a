"""What vLLM's pages hold: the catalogue, and what follows from it for an engine's groups and layers."""
