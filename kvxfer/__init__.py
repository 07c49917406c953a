"""kvxfer: moves the KV cache of LLM requests between prefill and decode engines, over any transport."""

__version__ = "0.1.0"
