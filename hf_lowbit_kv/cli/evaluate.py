"""`hf-lowbit-kv eval`: measurements of presets. Each command has a file of its own."""

from __future__ import annotations

import typer

from .perplexity import perplexity

eval_app = typer.Typer(help="Measure presets against the full-precision cache.", no_args_is_help=True)
eval_app.command("perplexity")(perplexity)
