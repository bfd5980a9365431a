"""`hf-lowbit-kv eval`: measurements of presets. Each command has a file of its own."""

from __future__ import annotations

import typer

from .layers import layers
from .perplexity import perplexity
from .sweep import sweep

eval_app = typer.Typer(help="Measure presets against the full-precision cache.", no_args_is_help=True)
eval_app.command("perplexity")(perplexity)
eval_app.command("layers")(layers)
eval_app.command("sweep")(sweep)
