"""`hf-lowbit-kv eval`: measurements of presets. Each command has a file of its own."""

from __future__ import annotations

import typer

from .layers import layers
from .lm_eval import lm_eval
from .needle import needle
from .perplexity import perplexity
from .sweep import sweep

eval_app = typer.Typer(help="Measure presets against the full-precision cache.", no_args_is_help=True)
eval_app.command("perplexity")(perplexity)
eval_app.command("layers")(layers)
eval_app.command("sweep")(sweep)
eval_app.command("needle")(needle)
# what the command does not know is lm-eval's
eval_app.command("lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(lm_eval)
