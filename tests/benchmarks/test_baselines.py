"""WUSH and OSCAR against what their papers prove: closed forms, not a copy of the code."""

import pytest
import torch
from cases import tiny_models
from mla_cases import tiny_models as tiny_latent_models
from sign_format import registries  # noqa: F401  (a fixture)
from tiny_tokenizers import TEXT, Numbers
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.benchmarks import baselines
from hf_lowbit_kv.eval.benchmarks.baselines import Clipped, Quest
from hf_lowbit_kv.eval.perplexity import score
from hf_lowbit_kv.formats.static import ERROR
from hf_lowbit_kv.storage.transforms import hadamard

pytestmark = pytest.mark.usefixtures("registries")
D, HEADS = 64, 2
OTHER = TEXT._replace(content=" ".join(str(7 * i % 90) for i in range(9000)))


def moment(scale=1.0):
    """A second moment with a steep spectrum, float64 `[HEADS, D, D]`."""
    basis = torch.linalg.qr(torch.randn(HEADS, D, D, dtype=torch.float64)).Q
    return (basis * torch.logspace(0, -4, D, dtype=torch.float64)) @ basis.mT * scale


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama")[0]


def test_wush_balances_what_errors_cost():
    """T^-T H T^-1 has equal diagonal entries (the paper's equation 20), and so has the second moment of what is stored. Both
    are the same diagonal matrix, rotated by Hadamard's. Sizes stay: ||T X|| = ||X||."""
    stored, cost = moment(), moment(3.0)
    matrix = baselines.wush(stored, cost, damping=0.0)
    inverse = torch.linalg.inv(matrix)
    balanced = inverse @ cost @ inverse.mT
    mapped = matrix.mT @ stored @ matrix
    for each in (balanced, mapped):
        diagonal = each.diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(diagonal, diagonal.mean(-1, keepdim=True).expand_as(diagonal), rtol=1e-6, atol=0)
    rotation = hadamard(D) * D**-0.5
    spectra = [rotation.T @ each @ rotation for each in (balanced, mapped)]
    for spectrum in spectra:
        off = spectrum - torch.diag_embed(spectrum.diagonal(dim1=-2, dim2=-1))
        assert off.abs().max() < 1e-6 * spectrum.abs().max()
    trace = lambda x: x.diagonal(dim1=-2, dim2=-1).sum(-1)  # noqa: E731
    torch.testing.assert_close(trace(mapped), trace(stored))


def test_wush_does_not_see_scales():
    stored, cost = moment(), moment()
    torch.testing.assert_close(baselines.wush(stored, 100 * cost), baselines.wush(stored, cost))
    torch.testing.assert_close(baselines.wush(100 * stored, cost), baselines.wush(stored, cost))


def test_wush_loses_least():
    """Noise of equal size in each stored channel, as a token's scale gives: no invertible matrix loses less."""
    stored, cost = moment(), moment()

    def lost(matrix):
        inverse = torch.linalg.inv(matrix)
        size = (matrix.mT @ stored @ matrix).diagonal(dim1=-2, dim2=-1).sum(-1)
        return size * (inverse @ cost @ inverse.mT).diagonal(dim1=-2, dim2=-1).sum(-1)

    identity = torch.eye(D, dtype=torch.float64).expand(HEADS, D, D)
    best = lost(baselines.wush(stored, cost, damping=0.0))
    # sum of the roots of the eigenvalues of H M, squared: no invertible matrix loses less
    roots = torch.linalg.eigvals(cost @ stored).real.clamp(min=0).sqrt().sum(-1)
    torch.testing.assert_close(best, roots.square(), rtol=1e-5, atol=0)
    for matrix in (identity, baselines.oscar(cost), hadamard(D).expand(HEADS, D, D)):
        assert (lost(matrix) > 1.5 * best).all()


def test_oscar_is_a_rotation_along_eigenvectors():
    of_queries = moment()
    matrix = baselines.oscar(of_queries)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(D, dtype=torch.float64).expand_as(matrix))
    along = matrix @ (hadamard(D) * D**-0.5).T  # Hadamard's rotation taken off again
    spectrum = along.mT @ of_queries @ along
    expected = torch.linalg.eigvalsh(of_queries).flip(-1)
    torch.testing.assert_close(spectrum, torch.diag_embed(expected), rtol=0, atol=1e-9)


def test_scores_and_outputs_stay(model):
    """Matrices alter nothing by themselves: with dense formats after them the logits are DynamicCache's."""
    ids = Numbers()(TEXT.content).input_ids[:, :300]
    moments = baselines.read_moments(model, [ids[0]])
    costs = baselines.output_costs(model, moments, {index: len(each.sums["k"]) for index, each in moments.items()})
    with torch.no_grad():
        expected = model(ids, past_key_values=DynamicCache(config=model.config)).logits
        for name in ("wush-2", "oscar-2"):
            given = {index: baselines.BASELINES[name].matrices(each, costs[index]) for index, each in moments.items()}
            both = {"transform": "matrix", "value_transform": "matrix", "parameters": given}
            got = model(ids, past_key_values=lb.LowBitCache(model, "dense", "dense", **both)).logits
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_moments_are_those_of_the_model(model):
    """Against the keys and values of DynamicCache, and an output projection that is looked up by hand."""
    ids = Numbers()(TEXT.content).input_ids[:, :200]
    found = baselines.read_moments(model, [ids[0, :100], ids[0, 100:]])
    for index in range(model.config.num_hidden_layers):
        keys = 0
        for window in (ids[:, :100], ids[:, 100:]):
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                model(window, past_key_values=cache)
            keys = keys + torch.einsum("hsd,hse->hde", *[cache.layers[index].keys[0].double()] * 2)
        torch.testing.assert_close(found[index].sums["k"], keys, rtol=1e-4, atol=1e-4)
    heads = len(found[0].sums["k"])
    costs = baselines.output_costs(model, found, dict.fromkeys(found, heads))
    weight = model.model.layers[1].self_attn.o_proj.weight.double()
    group = model.config.num_attention_heads // heads
    head_dim = costs[1].shape[-1]
    rows = [weight[:, h * head_dim : (h + 1) * head_dim].T for h in range(group)]
    torch.testing.assert_close(costs[1][0], sum(row @ row.T for row in rows))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_quest_has_the_error_of_the_best_uniform_quantizer(bits):
    x = torch.randn(64, 128, 128)
    fmt = Quest(bits)
    decoded = fmt.decode(fmt.encode(x), 128, 128, x.dtype)
    assert (decoded - x).square().mean() == pytest.approx(ERROR[bits], rel=0.05)
    half = (2**bits - 1) / 2
    step = (fmt.encode_arrays(x)["scale"]).float()
    assert ((decoded / step).abs().amax() - half).abs() < 1e-3
    assert fmt.decode(fmt.encode(torch.zeros(1, 128, 64)), 64, 128, x.dtype).eq(0).all()


def test_clipped_is_exact_where_nothing_is_rounded():
    """A token of four levels comes back; of magnitudes beyond the quantile only the quantile is left."""
    levels = torch.tensor([-1.5, -0.5, 0.5, 1.5]).repeat(16).expand(128, 64)
    fmt = Clipped(2, 100)
    torch.testing.assert_close(fmt.decode(fmt.encode(levels), 64, 128, levels.dtype), levels)
    x = torch.linspace(-63, 63, 64).expand(128, 64).clone()
    limit = float(x[0].abs().quantile(0.9))
    found = Clipped(4, 90).decode(Clipped(4, 90).encode(x), 64, 128, x.dtype)
    assert found.amax() == pytest.approx(limit, rel=1e-2)
    assert found.amin() == pytest.approx(-limit, rel=1e-2)


@pytest.mark.parametrize("name", ["quest2", "quest3", "quest4", "clipped2-q96", "clipped3-q92", "clipped4-q100"])
def test_names_and_bits(name):
    """Bits as the papers count them: a scale of 16 bits per token, and OSCAR's zero point."""
    fmt = (Quest if name.startswith("quest") else Clipped).parse(name)
    assert fmt.name == name
    assert Quest.parse("int2-token") is None
    assert Clipped.parse("clipped5-q92") is None
    for head_dim in (64, 128):
        numbers = len(fmt.scales)
        assert fmt.bits_per_value(head_dim) == fmt.bits + 16 * numbers / head_dim
    x = torch.randn(1, 128, 64)
    page = fmt.encode(x)
    part = fmt.encode(torch.cat([x[:, :50], torch.zeros(1, 78, 64)], 1))
    arrays = [fmt.split(each, 64, 128, x.dtype) for each in (page, part)]
    for array in arrays[0]:  # a token's bytes depend only on that token
        assert torch.equal(arrays[0][array][:, :50], arrays[1][array][:, :50])


@pytest.mark.parametrize("make", [lambda: Quest(5), lambda: Clipped(2, 0), lambda: Clipped(8)])
def test_what_is_not_offered(make):
    with pytest.raises(ValueError, match="allowed"):
        make()


def test_calibrated_baselines_are_measured_like_presets(model):
    names = ["wush-4", "wush-2", "oscar-2"]
    factories = baselines.calibrated(model, Numbers(), [OTHER.content], names, samples=2, progress=False)
    assert {name: baselines.bits_of_page(make()) for name, make in factories.items()} == {
        "wush-4": 4.25,
        "wush-2": 2.25,
        "oscar-2": 2.5,
    }
    measured = score(factories, [TEXT], model, Numbers(), 600, 300, parallel=True, progress=False)
    kl = {name: scores.means()["kl"] for name, (scores,) in measured.items()}
    assert 0 < kl["wush-4"] < kl["wush-2"]


def test_names_are_checked_first(model):
    with pytest.raises(ValueError, match=r"baseline='wush' is not known; allowed: wush-2"):
        baselines.calibrated(model, Numbers(), [OTHER.content], ["wush"])


def test_a_model_without_output_projection_is_named(model):
    found = baselines.read_moments(model, [Numbers()(TEXT.content).input_ids[0, :40]])
    with pytest.raises(ValueError, match="layer 0 has no output projection o_proj"):
        baselines.output_costs(torch.nn.Linear(2, 2), found, dict.fromkeys(found, 2))


def test_latents_are_refused():
    model = tiny_latent_models("deepseek_v3")[0]
    with pytest.raises(ValueError, match="layer 0 stores a latent: these baselines are not defined for it"):
        baselines.read_moments(model, [torch.arange(40)])
