"""`per_layer=` and `parameters=` on a small model with random weights; `python -m hf_lowbit_kv.eval.per_layer_example`."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_lowbit_kv as lb

LAYERS, KV_HEADS, HEAD_DIM = 4, 2, 64


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=160,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="lowbit_kv").eval()
    ids = torch.randint(3, 160, (1, 600))

    # the first layer in the model's dtype, the last one at 8 bits
    cache = lb.from_preset("kivi-2", model, per_layer={0: "dense", -1: "kv8"})
    model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0)
    for index, layer in enumerate(cache.packed_layers):
        print(f"layer {index}: {layer.spec.key_format} / {layer.spec.value_format}")
    print(cache.summary())

    # a factor for each channel; random here, where calibration would measure them
    factors = {index: {"key_transform.factors": torch.rand(KV_HEADS, HEAD_DIM) + 0.5} for index in range(LAYERS)}
    cache = lb.from_preset("kivi-2", model, transform="smooth+hadamard", parameters=factors)
    model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0)
    print(f"bytes of parameters: {cache.nbytes.parameters}")


if __name__ == "__main__":
    main()
