"""Heads of 192 and 512 channels, and keys wider than values: every format, against attention in float32."""

import os

import pytest
import torch
from cases import FORMAT_CASES
from kernel_cases import Case, filled, generator, plain, random_step, relative_error

import hf_lowbit_kv as lb
from hf_lowbit_kv.formats import parse_format
from hf_lowbit_kv.storage import reference

SEED = int(os.environ["TEST_SEED"])
FLOAT = torch.float32
#: head_dim of keys and of values: Gemma 4, MiMo-V2
WIDTHS = [(512, 512), (192, 128)]


def attended(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """What the reference attends to after padded chunks of keys and values, and attention in float32 to the same tokens,
    decoded. A transform is applied to queries here."""
    gen = generator(case, SEED)
    store, _ = filled(case, gen, "cpu")
    step = random_step(case, gen).float()
    out = reference.OPERATIONS.attend(step.inputs(case), store)
    mapped = reference.transformed(step.inputs(case), store)
    step.q, step.k, step.v = mapped.queries, mapped.k, mapped.v
    near = plain(step, store.state, case)
    return out, reference.restored(near, store)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("formats", FORMAT_CASES, ids="/".join)
def test_every_format(formats, widths):
    case = Case(
        *formats, head_dim=widths[0], head_dim_v=widths[1], heads=1, groups=2, tokens=3, lengths=(90, 37), dtype=FLOAT
    )
    out, near = attended(case)
    assert out.shape[-1] == widths[1]
    assert relative_error(out, near) < 1e-5


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize(
    "transforms", [("hadamard", "hadamard"), ("smooth+hadamard", None), ("eigen", "matrix")], ids=str
)
def test_transforms(transforms, widths):
    """They leave attention to tokens in the model's dtype as it is, apart from rounding."""
    options = {"head_dim": widths[0], "head_dim_v": widths[1], "lengths": (150, 37), "dtype": FLOAT, "heads": 1}
    mapped = Case("dense", "dense", transform=transforms[0], value_transform=transforms[1], **options)
    plainly = Case("dense", "dense", **options)
    gen = generator(plainly, SEED)
    chunks = [random_step(Case("dense", "dense", tokens=tokens, **options), gen) for tokens in (150, 1)]
    outs = []
    for case in (mapped, plainly):
        store, _ = filled(Case(**{**vars(case), "lengths": (0, 0), "capacity": 200}), gen, "cpu")
        reference.OPERATIONS.append(chunks[0].inputs(case)._replace(q=None), store)
        outs.append(reference.OPERATIONS.attend(chunks[1].inputs(case), store))
    assert relative_error(*outs) < 1e-4


@pytest.mark.parametrize("layout", ["planar-1", "fragment-1"])
def test_the_map_of_boosted_channels_holds_numbers_above_255(layout):
    fmt = parse_format("boosted2-r0.125").with_layout(layout)
    x = torch.randn(2, 128, 512) * 0.1
    x[..., 300:364] *= 100  # these are the ones to boost
    arrays = fmt.encode_arrays(x)
    assert arrays["map"][..., :64].long().tolist() == [list(range(300, 364))] * 2
    decoded = fmt.decode(fmt.encode(x), 512, 128, torch.float32)
    error = (decoded - x).abs() / (x.amax(1) - x.amin(1))[:, None]
    assert float(error[..., 300:364].max()) < 0.51 / 15
    assert 0.4 / 3 < float(error.max()) < 0.51 / 3


def test_presets_take_them():
    for preset in lb.preset_names():
        spec = lb.get_preset(preset).spec()
        if spec.attention_kind.name != "latent":
            for widths in WIDTHS:
                spec.validate(*widths)
