"""Train the small MLA language model that tests and accuracy tables run on: `python tests/data/train_tiny_mla.py`.

The architecture is DeepSeek-V3's attention with dense layers: bytes as tokens, a latent of 256 channels and 32 channels of
RoPE. The recipe is fixed by the seed and by the time given, so a second run gives a model of the same quality, not the same
bits. A GPU needs about two minutes. The shipped model was trained on the King James Bible and the Jargon File, both in the
public domain (Debian packages `bible-kjv-text`, read with `bible`, and `jargon-text`).
"""

from __future__ import annotations

import gzip
import math
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

#: share of each text, from its start, where the held-out part begins and ends
HELD_OUT = (0.90, 0.95)
#: share of the time after which the context grows to `long_context`
LONG_AFTER = 0.7


def config(**changes) -> DeepseekV3Config:
    """The model's configuration: about 6.3 million parameters."""
    layers = changes.get("num_hidden_layers", 6)
    options = {
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers,  # every layer has a dense MLP: no experts
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": None,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        # a configuration must name experts, and no layer has any
        "n_routed_experts": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
    }
    return DeepseekV3Config(**{**options, **changes})


def read_text(path: Path) -> str:
    """A UTF-8 text, perhaps gzipped: paragraphs of one line each, without indentation."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    paragraphs, words = list[str](), list[str]()
    for line in [*text.splitlines(), ""]:
        if line.strip():
            words += line.split()
        elif words:
            paragraphs.append(" ".join(words))
            words = []
    return "\n".join(paragraphs) + "\n"


def split_text(text: str) -> tuple[bytes, bytes]:
    """What the model is trained on, and what it never sees, as bytes."""
    raw = text.encode()
    start, stop = (int(len(raw) * share) for share in HELD_OUT)
    return raw[:start] + raw[stop:], raw[start:stop]


def as_tokens(text: bytes) -> torch.Tensor:
    """int64 `[bytes]`."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def bits_per_byte(model, tokens: torch.Tensor, context: int, most: int = 64) -> float:
    """Mean over windows of `context` tokens (at most `most` windows)."""
    windows = tokens[: len(tokens) // context * context].view(-1, context)[:most]
    losses = []
    with torch.no_grad():
        for window in windows.split(8):
            ids = window.to(model.device)
            losses.append(float(model(ids, labels=ids).loss) * len(window))
    return sum(losses) / len(windows) / math.log(2)


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over 2 % of the time, then a cosine to 2 % of the peak."""
    if progress < 0.02:
        return peak * progress / 0.02
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - 0.02) / 0.98)))


def train(
    tokens: torch.Tensor,
    seconds: float,
    device: torch.device | str,
    batch_tokens: int = 2**17,
    contexts: tuple[int, int] = (1024, 4096),
    peak: float = 3e-3,
    **changes,
) -> DeepseekV3ForCausalLM:
    """A model trained for `seconds` on `tokens` `[n]`, float32, in evaluation mode. `changes`: of `config`."""
    torch.manual_seed(0)
    model: Any = DeepseekV3ForCausalLM(config(**changes)).float()
    model.to(device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=torch.device(device).type == "cuda")
    tokens, begin, step = tokens.to(device), time.monotonic(), 0
    model.train()
    while (progress := (time.monotonic() - begin) / seconds) < 1:
        context = contexts[progress > LONG_AFTER]
        starts = torch.randint(0, len(tokens) - context, (max(batch_tokens // context, 1),), device=device)
        ids = tokens[starts[:, None] + torch.arange(context, device=device)]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, peak)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            loss = model(ids, labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            print(f"step {step}, {progress:.0%}, {float(loss.detach()) / math.log(2):.3f} bits/byte", flush=True)
    print(f"{step} steps, {step * batch_tokens / 1e6:.0f} million tokens, {time.monotonic() - begin:.0f} s")
    return model.eval()


def main(
    texts: Annotated[list[Path], typer.Argument(help="UTF-8 texts, plain or gzipped")],
    output: Annotated[Path, typer.Option(help="folder for the model and the held-out text")],
    seconds: Annotated[float, typer.Option(help="training time", min=1)] = 150,
    batch_tokens: Annotated[int, typer.Option(help="tokens per step", min=64)] = 2**17,
) -> None:
    """Train the small MLA model and write it with the held-out text."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = [split_text(read_text(path)) for path in texts]
    model = train(as_tokens(b"".join(train for train, _ in parts)), seconds, device, batch_tokens)
    model = model.bfloat16()
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output)
    model = model.float()
    for path, (seen, held_out) in zip(texts, parts):
        name = path.name.split(".")[0]
        (output / f"{name}-held-out.txt").write_bytes(held_out[: 2**15])
        for context in (size for size in (1024, 4096) if size <= len(held_out)):
            found = [bits_per_byte(model, as_tokens(part), context, 32) for part in (held_out, seen)]
            print(f"{name}: context {context}: held out {found[0]:.4f}, trained on {found[1]:.4f} bits/byte")
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters")


if __name__ == "__main__":
    typer.run(main)
