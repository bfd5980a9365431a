"""`hf_lowbit_kv.eval.chunked_reader`: log-likelihoods through a cache are those of decoding, for any sharing and batching."""

from collections import Counter

import pytest
import torch
from cases import SMALL_PAGES, tiny_models
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval import chunked_reader
from hf_lowbit_kv.eval.chunked_reader import MOST_PADDED, Reader, Text, next_bound, shared_beginnings
from hf_lowbit_kv.formats import Affine

PREFIX = [3 + i * i % 97 for i in range(150)]


def contexts():
    """Texts with one long beginning: three contexts, three continuations each, two of which differ in their last token."""
    texts = []
    for number, length in enumerate((20, 41, 60)):
        context = PREFIX + [5 + (number + 3) * i % 87 for i in range(1, length + 1)]
        for continuation in ([7, 9, 11], [7, 9, 12], [8 + number] * 17):
            texts.append(Text(context + continuation, len(context)))
    return texts


@pytest.fixture
def reader(models):
    def make(preset, chunk=32, batch_size=8, **options):
        def cache():
            if preset == "full":
                return DynamicCache(config=models[0].config)
            return lb.from_preset(preset, models[0], **SMALL_PAGES, **options)

        return Reader(models[0], cache, chunk, batch_size)

    return make


def plain(model, texts):
    """One forward pass a text, without a cache."""
    found = []
    for text in texts:
        with torch.no_grad():
            logprobs = model(torch.tensor([text.tokens])).logits[0, text.start - 1 : -1].double().log_softmax(-1)
        targets = torch.tensor(text.tokens[text.start :])
        found.append((float(logprobs.gather(1, targets[:, None]).sum()), bool((logprobs.argmax(-1) == targets).all())))
    return found


def decoded(model, cache, text):
    """Token by token through a cache."""
    total = 0.0
    for position, token in enumerate(text.tokens[:-1]):
        with torch.no_grad():
            logits = model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
        if position >= text.start - 1:
            total += float(logits.double().log_softmax(-1)[text.tokens[position + 1]])
    return total


@pytest.mark.host
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("preset", ["dense", "full"])
def test_full_precision_is_one_pass_without_a_cache(models, reader, preset, batch_size):
    texts = contexts()
    scores = reader(preset, batch_size=batch_size).score(texts)
    for score, (logprob, greedy) in zip(scores, plain(models[1], texts), strict=True):
        assert score.logprob == pytest.approx(logprob, abs=1e-4)
        assert score.greedy == greedy


def test_greedy_continuations_are_recognised(models, reader):
    with torch.no_grad():
        written = models[1].generate(torch.tensor([PREFIX]), max_new_tokens=3, do_sample=False)[0].tolist()
    other = [*written[:-1], (written[-1] + 1) % 160]
    right, wrong = reader("full").score([Text(written, len(PREFIX)), Text(other, len(PREFIX))])
    assert (right.greedy, wrong.greedy) == (True, False)


@pytest.mark.parametrize(
    "preset", ["kitty-pro", *(pytest.param(name, marks=pytest.mark.slow) for name in ("kivi-2", "kv4-hadamard"))]
)
def test_packed_history_is_that_of_decoding(models, reader, preset):
    texts = contexts()
    scores = reader(preset).score(texts)
    cache = lb.from_preset(preset, models[0], **SMALL_PAGES)
    assert scores[3].logprob == pytest.approx(decoded(models[0], cache, texts[3]), abs=1e-3)
    exact = plain(models[1], texts)
    assert max(abs(score.logprob - logprob) for score, (logprob, _) in zip(scores, exact, strict=True)) > 0.1


@pytest.mark.parametrize("preset", ["kivi-2", pytest.param("kitty", marks=pytest.mark.slow)])
def test_results_depend_neither_on_the_batch_nor_on_other_texts(reader, preset):
    texts = contexts()
    one, eight = (reader(preset, batch_size=size) for size in (1, 8))
    single = [reader(preset).score([text])[0].logprob for text in texts[::4]]
    assert [score.logprob for score in one.score(texts)] == pytest.approx(
        [score.logprob for score in eight.score(texts)], abs=1e-3
    )
    assert [score.logprob for score in eight.score(texts)][::4] == pytest.approx(single, abs=1e-3)
    assert one.share.value == pytest.approx(eight.share.value)


@pytest.mark.parametrize("most", [MOST_PADDED, float("inf")])
@pytest.mark.parametrize("preset", ["full", "kivi-2"])
def test_rows_of_a_batch_may_lie_far_apart(reader, preset, most, monkeypatch):
    """Continuations of a short and of a long context, several chunks one after another, in one batch or not."""
    monkeypatch.setattr(chunked_reader, "MOST_PADDED", most)
    texts = []
    for first, length in ((5, 20), (6, 200)):
        context = PREFIX + [first + 3 * i % 87 for i in range(length)]
        texts += [Text([*context, 7, last, 9], len(context)) for last in (1, 2)]
    single = [reader(preset).score([text])[0].logprob for text in texts]
    assert [score.logprob for score in reader(preset).score(texts)] == pytest.approx(single, abs=1e-3)


def test_a_cpu_computes_little_padding(models, reader):
    """Rows that begin at very different places go through the cache one by one; a CPU pays for padding as for tokens."""
    computed = []
    texts = [Text(PREFIX[:begin] + [5] * (300 - begin) + [7], 299) for begin in (0, 40, 80, 120)]
    with models[0].register_forward_pre_hook(lambda module, args: computed.append(args[0].numel())):
        reader("kivi-2").score(texts)
    # what all have in common, up to 40, 80 and 120 tokens, is read once, and the rest of each text
    tokens = 120 + (300 - 0) + (300 - 40) + (300 - 80) + (300 - 120)
    assert tokens <= sum(computed) <= MOST_PADDED * tokens


def test_a_common_beginning_is_read_once(models, reader):
    read = []

    def see(module, args, kwargs):
        read.append(int(kwargs["attention_mask"][:, -args[0].shape[1] :].sum()))

    with models[0].register_forward_pre_hook(see, with_kwargs=True):
        reader("kivi-2").score(contexts())
    # the long beginning, the rest of three contexts, and two continuations each (two differ only in their last token)
    assert sum(read) == 150 + (20 + 41 + 60) + 3 * (2 + 16)


def test_beginnings_are_the_texts():
    texts = [[1] * 20 + [2] * 20, [1] * 20 + [2] * 20 + [3], [1] * 20 + [4] * 5, [9], [1] * 20]

    def paths(nodes, before=()):
        for node in nodes:
            path = (*before, *node.tokens[node.start : node.end])
            assert len(path) == node.end
            ends = [index for index in node.members if len(texts[index]) == node.end]
            assert all(texts[index][: node.end] == list(path) for index in node.members)
            yield from ends
            yield from paths(node.children, path)

    assert Counter(paths(shared_beginnings(texts))) == Counter(range(5))
    assert {node.end for node in shared_beginnings(texts)} == {1, 20}


def test_packed_share_is_counted(reader):
    length, text = 200, Text([3 + i % 90 for i in range(200)], 190)
    found = reader("kivi-2")
    found.score([text])
    # page 32 and residual 32: of `n` stored tokens, (n - 32) // 32 * 32 are in pages when the next one attends
    packed = sum((position - 32) // 32 * 32 for position in range(189, length - 1))
    attended = sum(position + 1 for position in range(189, length - 1))
    assert found.share.packed == packed
    assert found.share.attended == attended
    dense = reader("dense")
    dense.score([text])
    assert dense.share.value == 0
    half = reader("kivi-2", dense_layers=[0])
    half.score([text])
    assert half.share.value == pytest.approx(packed / attended / 2)


def test_damaged_pages_change_scores(reader, monkeypatch):
    """Were pages never read, this could not be seen."""
    texts = contexts()
    intact = [score.logprob for score in reader("kivi-4").score(texts)]
    decode = Affine.decode_arrays
    monkeypatch.setattr(Affine, "decode_arrays", lambda self, *args, **kwargs: decode(self, *args, **kwargs).flip(-1))
    damaged = [score.logprob for score in reader("kivi-4").score(texts)]
    assert min(abs(a - b) for a, b in zip(intact, damaged, strict=True)) > 0.01


@pytest.mark.parametrize(
    ("position", "chunk", "bound"),
    [(0, 128, 32), (32, 128, 160), (0, 50, 32), (32, 50, 82), (132, 50, 160), (100, 256, 160), (160, 256, 416)],
)
def test_chunks_end_where_pages_are_packed(position, chunk, bound):
    assert next_bound(position, {(160, 128)}, chunk) == bound


@pytest.mark.parametrize("family", ["gemma2", "qwen3_next"])
def test_other_layers_are_read_row_by_row(family):
    """Padding would be read by recurrent layers and counted by sliding ones."""
    ours, theirs = tiny_models(family)
    reader = Reader(ours, lambda: lb.from_preset("dense", ours, **SMALL_PAGES), 32)
    texts = contexts()[:5]
    scores = reader.score(texts)
    for score, (logprob, _) in zip(scores, plain(theirs, texts), strict=True):
        assert score.logprob == pytest.approx(logprob, abs=1e-3)
