"""A tiny Llama with random weights, the same wherever it is made, and its prompts."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

VOCAB, ANSWER = 512, 20


def make_model():
    """Return the model. With this spread of its weights, what it answers depends on every byte of its KV."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def prompts():
    """Return the ids of each prompt, [1, tokens]."""
    random = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB, (1, tokens), generator=random) for tokens in (300, 17, 64)]
