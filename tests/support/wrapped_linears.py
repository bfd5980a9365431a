"""Linear layers as quantization and adapters leave them."""

import torch


class Int8Linear(torch.nn.Module):
    """As quantized layers are: integers and a scale, dequantized in every call."""

    calls = 0

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x):
        Int8Linear.calls += 1
        return x @ (self.codes * self.scale).to(x.dtype).T


class Adapted(torch.nn.Module):
    """As adapters are: a layer inside a layer."""

    def __init__(self, linear):
        super().__init__()
        self.base_layer, self.on = linear, True
        rows, columns = (linear.codes if isinstance(linear, Int8Linear) else linear.weight).shape
        self.low, self.high = (
            torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
            for shape, seed in (((columns, 4), 2), ((4, rows), 3))
        )

    def forward(self, x):
        return self.base_layer(x) + (x @ self.low @ self.high if self.on else 0)
