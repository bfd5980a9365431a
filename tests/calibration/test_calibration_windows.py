"""Texts of any length become windows; messages before a model reads them, and progress meanwhile."""

import inspect

import pytest
import torch
from cases import tiny_models

import hf_lowbit_kv as lb
from hf_lowbit_kv.calibration import gradients
from hf_lowbit_kv.calibration.calibration_windows import Tokens, first_positions

END = 1


class Numbers:
    """A token for each number in a text."""

    def __init__(self, end=END):
        self.eos_token_id = end

    def __call__(self, text, **options):
        return type("Ids", (), {"input_ids": torch.tensor([[int(word) for word in text.split()]])})


def text(first, count):
    return " ".join(str(number) for number in range(first, first + count))


def windows_of(texts, length, end=END):
    return [[window.tolist() for window in windows] for windows in Tokens(texts, Numbers(end)).windows(length)]


# ---- cutting and joining ----------------------------------------------------------------------------------------------


def test_long_texts_are_cut_and_the_rest_is_joined():
    whole, joined = windows_of([text(100, 9), text(200, 3), text(300, 4), text(400, 6)], 4)
    assert whole == [[*range(100, 104)], [*range(104, 108)], [*range(300, 304)], [*range(400, 404)]]
    # 108, and the texts and remainders after it; an end token between two, the last piece is not filled up
    assert joined == [[108, END, 200, 201], [202, END, 404, 405]]


def test_a_text_as_long_as_a_window_leaves_nothing():
    assert windows_of([text(100, 4), text(200, 8)], 4) == [
        [[100, 101, 102, 103], [*range(200, 204)], [*range(204, 208)]],
        [],
    ]


def test_end_tokens_are_not_doubled_and_may_be_missing():
    assert windows_of([f"10 11 {END}", "12", "13 14"], 6)[1] == [[10, 11, END, 12, END, 13]]
    assert windows_of(["10 11", "12", "13 14"], 5, end=None)[1] == [[10, 11, 12, 13, 14]]


# ---- positions --------------------------------------------------------------------------------------------------------


def test_every_second_window_begins_at_0_and_the_others_in_every_part_of_the_positions():
    """Of eight others one in each eighth, at random; RoPE scaling counts."""
    model = tiny_models("llama", max_position_embeddings=1000)[0]
    firsts = first_positions(model, 16, 200, 0)
    assert firsts[::2] == [0] * 8
    assert sorted(first * 8 // 801 for first in firsts[1::2]) == list(range(8)) != [x * 8 // 801 for x in firsts[1::2]]
    assert [len(first_positions(model, count, 200, 0)) for count in (1, 2, 3)] == [1, 2, 3]
    firsts = first_positions(model, 8, 200, 0)
    assert firsts == first_positions(model, 8, 200, 0) != first_positions(model, 8, 200, 1)
    scaling = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1000}
    model = tiny_models("llama", max_position_embeddings=1000, rope_parameters=scaling)[0]
    assert 2800 < max(first_positions(model, 8, 200, 0)) <= 3800
    assert first_positions(model, 2, 4000, 0) == [0, 0]  # no room


def test_models_that_take_no_positions_begin_at_0(monkeypatch):
    model = tiny_models("llama")[0]
    assert any(first_positions(model, 3, 64, 0))
    monkeypatch.setattr(model, "forward", lambda input_ids, past_key_values=None: None)
    assert first_positions(model, 3, 64, 0) == [0, 0, 0]


def test_both_passes_read_windows_from_these_positions(monkeypatch):
    """Keys, and gradients chunk by chunk; predictions stay, because RoPE depends only on distances."""
    model, seen = tiny_models("llama", max_position_embeddings=5000)[0], []
    forward = model.forward

    def spy(*args, position_ids=None, **kwargs):
        seen.append(None if position_ids is None else position_ids[0, [0, -1]].tolist())
        return forward(*args, position_ids=position_ids, **kwargs)

    spy.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(model, "forward", spy)
    words = [3 + i * i * 7 % 147 for i in range(9000)]
    made = lb.calibrate(
        model, Numbers(), [" ".join(map(str, words))], "eigen-2", samples=2, length=1024, progress=False
    )
    firsts = first_positions(model, 2, 1024, 0)
    expected = [[first, first + 1023] if first else None for first in firsts]  # None: models count from 0 themselves
    for first in firsts:
        expected += [[at, at + 127] if first else None for at in range(first, first + 1024, 128)]
    assert seen == expected
    assert any(seen)
    assert made.source[0]["positions"] == max(firsts) + 1024
    ids = torch.tensor([words[:64]])
    near, far = (forward(ids, position_ids=torch.arange(64)[None] + first).logits for first in (0, 4000))
    torch.testing.assert_close(near, far, rtol=1e-2, atol=1e-2)


def test_empty_texts_bring_neither_tokens_nor_ends():
    tokens = Tokens(["", "10 11", " \n", "12 13"], Numbers())
    assert tokens.count == 4
    assert tokens.windows(5)[1][0].tolist() == [10, 11, END, 12, 13]
    assert Tokens([], Numbers()).windows(5) == ([], [])


def test_joined_windows_are_taken_only_where_whole_ones_are_too_few():
    """So a book gives the windows that it gave before pieces were joined."""
    texts = [text(1000, 20 * 256 + 200), *(text(9000 + 300 * i, 100) for i in range(8))]
    tokens = Tokens(texts, Numbers())
    (whole, joined), first_text = tokens.windows(256), Tokens(texts[:1], Numbers())
    assert (len(whole), len(joined)) == (20, 3)  # 200 + 8 x 100 tokens, and 8 end tokens
    for samples in (5, 20):
        drawn, before = (each.draw(samples, 256, 7, "cpu", least=256).windows for each in (tokens, first_text))
        assert len(drawn) == samples
        assert all(map(torch.equal, drawn, before))
    every = tokens.draw(23, 256, 7, "cpu", least=256).windows
    assert sorted(map(torch.Tensor.tolist, every)) == sorted(map(torch.Tensor.tolist, whole + joined))
    some = [x.tolist() for x in tokens.draw(21, 256, 7, "cpu", least=256).windows]
    assert sum(x in [y.tolist() for y in joined] for x in some) == 1


def test_what_is_wanted_depends_on_the_device():
    tokens = Tokens([text(0, 300 * 512)], Numbers())
    for device, count in (("cpu", 64), ("cuda", 256), ("mps", 256)):
        drawn = tokens.draw(None, 512, 0, device, least=256)
        assert (len(drawn.windows), drawn.target) == (count, count * 512)


@pytest.mark.parametrize(
    ("samples", "length", "expected"),
    [
        (None, None, (8, [1024, 512])),
        (2, 512, (2, [512])),
        (2, 4096, (2, [1024, 512])),
        (64, 600, (8, [512])),
        (None, 256, (8, [512])),  # gradients need 512 tokens
    ],
)
def test_windows_for_gradients_follow_the_options(samples, length, expected):
    assert gradients.gradient_windows(tiny_models("llama")[0], samples=samples, length=length) == expected


def test_windows_for_gradients_are_of_the_first_length_that_there_is():
    assert gradients.gradient_windows(tiny_models("llama")[0]) == (8, [1024, 512])
    for count, length in ((1024, 1024), (1023, 512), (512, 512)):
        drawn = Tokens([text(0, count // 2), text(5000, count - count // 2 - 1)], Numbers())
        (window,) = drawn.draw_for_gradients(8, [1024, 512], 0).windows[:1]
        assert len(window) == length
    with pytest.raises(ValueError, match="too short for gradients: 511 tokens, and 512 are needed"):
        Tokens([text(0, 511)], Numbers()).draw_for_gradients(8, [1024, 512], 0)


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama")[0]


def calibrate(model, texts, preset="eigen-2", **options):
    """Without k-means, so that it is quick."""
    return lb.calibrate(
        model, Numbers(), texts, preset, **{"length": 256, "gradients": False, "attention": False, **options}
    )


def test_many_short_texts_calibrate(model):
    """Answers of a chat, say: none has a window, together they have 16."""
    found = calibrate(model, [" ".join(["5", "17", str(3 + i % 100)] * 33) for i in range(45)])
    assert found.source[0]["samples"] == 17
    lb.from_preset("eigen-2", model, calibration=found)


# ---- messages and progress --------------------------------------------------------------------------------------------

LONG = [" ".join(str(3 + i * i % 97) for i in range(5000)), "5 6 7"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"samples": 2}, "512 are wanted, and 512 will be read: 2 windows of 256"),
        ({}, "32768 are wanted, and 4864, as many as there are, will be read: 19 windows of 256"),
        (
            {"samples": 1, "gradients": True},
            "256 are wanted, and 256 will be read: 1 window of 256, and 1 window of 512 for gradients",
        ),
    ],
)
def test_tokens_are_announced_before_the_model_reads(options, line, model, capsys):
    printed = []
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda *_: printed.append(capsys.readouterr()))
    calibrate(model, LONG, **options)
    handle.remove()
    assert printed[0].err == f"calibrating on 2 texts of 5003 tokens; {line}\n"
    assert not any(each.out or each.err for each in printed[1:])  # no bar where standard error is no terminal
    assert capsys.readouterr() == ("", "")


def test_a_function_is_called_in_place_of_the_bar(model, capsys):
    calls = []
    calibrate(model, LONG, samples=2, gradients=True, progress=lambda *step: calls.append(step))
    parts = [[(part, done, total) for done in range(total + 1)] for part, total in (("reading", 2), ("gradients", 2))]
    assert calls == [*parts[0], *parts[1], ("fitting", 0, 2), ("fitting", 1, 2), ("fitting", 2, 2)]
    assert capsys.readouterr().err.startswith("calibrating on")
