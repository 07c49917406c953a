"""A tiny BLIP-2 of random weights, whose answers depend on the image; random adapters for it; and requests with images."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

from kvxfer_vllm.demo.model import HEADS, HIDDEN, INTERMEDIATE, LAYERS, MAX_LEN, SPREAD, VOCAB, write_model
from kvxfer_vllm.demo.servers import MODEL_NAME, Server

SIDE, PATCH, QUERIES = 32, 8, 16
IMAGE_TOKEN, IMAGE_ID = "<image>", 256
"""The tokenizer of ``write_model`` has 256 tokens, one for each byte."""
TEMPLATE = (
    "{% for m in messages %}{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def write_blip(folder: Path) -> None:
    """A CLIP-like tower and a Q-Former, both of two layers, before an OPT with a token for each byte."""
    import torch
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        OPTConfig,
    )

    write_model(folder)
    one = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Blip2Config(
        vision_config=Blip2VisionConfig(**one, image_size=SIDE, patch_size=PATCH),
        qformer_config=Blip2QFormerConfig(**one, encoder_hidden_size=64, vocab_size=VOCAB, cross_attention_frequency=1),
        text_config=OPTConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            word_embed_proj_dim=HIDDEN,
            ffn_dim=INTERMEDIATE,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=MAX_LEN,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        ),
        num_query_tokens=QUERIES,
        image_token_index=IMAGE_ID,
    )
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name.lower():
                weight.normal_(0.0, SPREAD)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(
        {
            "id": IMAGE_ID,
            "content": IMAGE_TOKEN,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    images = {
        "image_processor_type": "BlipImageProcessor",
        "do_resize": True,
        "size": {"height": SIDE, "width": SIDE},
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.2, 0.2, 0.2],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    processor = {"processor_class": "Blip2Processor", "num_query_tokens": QUERIES}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))


def write_adapter(folder: Path, seed: int) -> None:
    """A LoRA for the attention of its language model, strong enough to change every answer."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, rank = np.random.default_rng(seed), 8
    names = ["k_proj", "q_proj", "v_proj"]
    weights = {}
    for i in range(LAYERS):
        for name in names:
            layer = f"base_model.model.language_model.model.decoder.layers.{i}.self_attn.{name}"
            weights[f"{layer}.lora_A.weight"] = rng.normal(0.0, SPREAD, (rank, HIDDEN)).astype(np.float32)
            weights[f"{layer}.lora_B.weight"] = rng.normal(0.0, SPREAD, (HIDDEN, rank)).astype(np.float32)
    beside = folder / "next.safetensors"
    save_file(weights, beside)
    beside.replace(folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def picture(seed: int) -> str:
    """A random image, as a data URL."""
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), np.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def look(
    server: Server, image: str, text: str, tokens: int, params: dict[str, Any] | None = None, **more: Any
) -> tuple[list[int], dict[str, Any] | None]:
    """What a server says to an image and a text; more are keys of the image's part of the request."""
    part = {"type": "image_url", "image_url": {"url": image}, **more}
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": [part, {"type": "text", "text": text}]}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if params is not None:
        body["kv_transfer_params"] = params
    answer = server.post("/v1/chat/completions", body, 120.0)
    return answer["choices"][0]["token_ids"], answer.get("kv_transfer_params")


assert IMAGE_ID < VOCAB
