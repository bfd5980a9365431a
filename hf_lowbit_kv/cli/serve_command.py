"""`hf-lowbit-kv serve`: serves a model with OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..byte_sizes import parse_size
from ..eval.local_models import bundled_model
from ..installation import EXTRAS, need
from ..presets import DEFAULT_PRESET, get_preset
from .shared_options import (
    DTYPES,
    CalibrationOption,
    ModelOption,
    SetOption,
    check_device,
    check_dtype,
    parse_overrides,
    print_json,
)


def serve(
    model: ModelOption = None,
    preset: Annotated[str, typer.Option("--preset", "-p", help="Preset of the cache.")] = DEFAULT_PRESET,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    memory: Annotated[
        str | None, typer.Option(help="Memory of the cache, e.g. 24GB.", show_default="90 % of the free memory")
    ] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Largest number of concurrent sequences.")] = None,
    device: Annotated[str, typer.Option(help="E.g. cpu, cuda:1. auto: layers spread over all GPUs.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help=f"One of auto, {', '.join(DTYPES)}. auto: the dtype of the weights.")
    ] = "auto",
    overrides: SetOption = None,
    calibration: CalibrationOption = None,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Requests that may wait for a row; others get HTTP 429.")
    ] = 512,
    prefill_chunk_size: Annotated[
        int, typer.Option(min=1, help="Tokens of a prompt that are prefilled between two decoding steps.")
    ] = 2048,
    share_prefixes: Annotated[
        bool,
        typer.Option(
            help="Share packed pages between prompts with a common prefix. A client can detect that by timing."
        ),
    ] = True,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of PrefixStore.save: requests that begin with one of its prompts read only the rest.",
            show_default="none",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Id of the model.", show_default="its hub name, or its folder's last part")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="HF_LOWBIT_KV_API_KEY", help="Key that clients must send.", show_default="none")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin that may send requests (CORS), or *; repeatable.", show_default="none"),
    ] = None,
    patience: Annotated[
        int, typer.Option(min=0, help="Seconds to finish running requests after SIGTERM or Ctrl-C.")
    ] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object when the server is ready.")] = False,
) -> None:
    """Serve a model with OpenAI's API.

    Paths: /v1/chat/completions, /v1/completions, /v1/models, /health. The server is transformers' own. It batches
    requests, and prompts with a common prefix share packed pages.
    """
    need("serve", "serve", *EXTRAS["serve"].modules)
    get_preset(preset)
    from ..cache.prefix_store import PrefixStore
    from ..requests.paged_calls import check_version

    check_version()
    check_dtype(dtype, ("auto", *DTYPES))
    check_device(None if device == "auto" else device)
    if api_key == "":
        raise ValueError("--api-key '' is not allowed; leave it out for a server without a key")
    size = None if memory is None else parse_size(memory, "memory")
    options = parse_overrides(overrides, calibration)
    prefixes = None if prompts is None else PrefixStore(folder=prompts)

    from ..requests.server.openai_server import serve as run

    console = Console(stderr=True)
    run(
        str(bundled_model()) if model is None else model,
        preset,
        host,
        port,
        device=device,
        dtype=dtype,
        memory=size,
        max_rows=max_rows,
        max_waiting=max_waiting,
        chunk_size=prefill_chunk_size,
        share_prefixes=share_prefixes,
        prefixes=prefixes,
        served_model_name=served_model_name,
        api_key=api_key,
        allow_origins=allow_origin or (),
        patience=patience,
        cache_options=options,
        say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
        ready=print_json if as_json else None,
    )
