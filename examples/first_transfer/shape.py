import numpy as np

from kvxfer import Cache

LAYERS, BLOCKS, TOKENS, TOKEN_BYTES = 4, 32, 16, 256
FACTS = {"model": "my-model", "dtype": "bfloat16"}  # what all KV of an engine depends on


def make_cache():
    """Return the memory and its description."""
    memory = np.zeros((LAYERS, BLOCKS, TOKENS, TOKEN_BYTES), np.uint8)
    return memory, Cache.of_tensors(memory, "layer block token unit", encoding="bf16")
