"""`--device auto`: a model whose layers are spread over two GPUs is measured as on one GPU."""

import json

import pytest
import torch
from command_line import call

from hf_lowbit_kv.eval import local_models

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def rows_of(capsys, *command):
    code, out, err = call(capsys, *command, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.fixture
def spread(monkeypatch):
    """`auto` leaves so small a model on one GPU."""
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1}
    monkeypatch.setattr(local_models, "DEVICE_MAP", {**places, "lm_head": 1})


def test_the_layers_are_spread(model_folder, spread):
    model = local_models.load_model(str(model_folder), device="auto")[0]
    assert {str(parameter.device) for parameter in model.parameters()} == {"cuda:0", "cuda:1"}


def test_perplexity_and_lm_eval(model_folder, spread, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str((i * i) % 101) for i in range(700)))
    window = ["--text", text, "--context", 300, "--from", 150]
    commands = [["eval", "perplexity", *window]]
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        pass  # its packages are many; perplexity is measured without them
    else:
        commands.append(["eval", "lm-eval", "--tasks", "hellaswag_100", "--limit", 4, "--allow-unpacked"])
    for command in commands:
        options = [*command, "--model", model_folder, "--preset", "dense,kivi-2", "--dtype", "float32"]
        one, two = (rows_of(capsys, *options, "--device", device) for device in ("cuda:0", "auto"))
        for row in (*one, *two):
            row.pop("seconds", None)
        assert two == one
