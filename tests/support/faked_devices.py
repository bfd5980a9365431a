"""Devices that are not there: backends are chosen as on them, and nothing can be launched."""

from types import SimpleNamespace

import torch

from hf_lowbit_kv.backends import choice


def as_on_an_h100(monkeypatch) -> torch.device:
    """The GPU, on a machine that lacks nothing."""
    properties = SimpleNamespace(shared_memory_per_multiprocessor=228 * 1024)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(choice, "has_cuda_bindings", lambda: True)
    monkeypatch.setattr(choice, "why_cuda_cannot_compile", lambda capability: None)
    for name in ("why_triton_cannot_launch", "why_gpu_cannot_launch"):
        monkeypatch.setattr(choice, name, lambda: None)
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    return torch.device("cuda")


def choose_as_on(monkeypatch, device: torch.device) -> None:
    """Backends are chosen as for a model on that device, although it is on the CPU."""
    for name in ("choose_backend", "describe_backend", "why_slow_reference"):
        original = getattr(choice, name)

        def moved(*args, original=original):
            *names, setup = args
            return original(*names, setup._replace(device=device))

        monkeypatch.setattr(choice, name, moved)
