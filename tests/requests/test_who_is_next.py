"""Which request gets a row, and whose prompt is read: short requests pass long ones, and no request waits for ever. Nor does a
token that is there."""

import itertools
from unittest.mock import Mock

import pytest
import torch
from cases import SMALL_PAGES

from hf_lowbit_kv.cache.implementation import selected
from hf_lowbit_kv.requests.pool_models import empty_caches
from hf_lowbit_kv.requests.pool_steps import new_pool
from hf_lowbit_kv.requests.request import RequestReader
from hf_lowbit_kv.requests.scheduler import Scheduler, _Pending

CHUNK, ROWS = 64, 3


class Run:
    """A scheduler on a small pool, with requests of these lengths: prompt, and tokens to write."""

    def __init__(self, models, lengths, look_ahead, tokens=320, streamer=lambda index: None):
        self.model, self.theirs = models
        self.streamer = streamer
        self.reader = RequestReader(self.model, None, {"do_sample": False})
        make = empty_caches(self.model, "dense", SMALL_PAGES)
        with selected(self.model), torch.no_grad():
            sizes = {"tokens": tokens, "max_rows": ROWS, "memory": 50_000_000, "share_prefixes": False}
            steps, _ = new_pool(self.model, make, CHUNK, **sizes)
        self.requests = []
        self.scheduler = Scheduler(steps, self.source(lengths), CHUNK, look_ahead=look_ahead)
        self.rounds, self.begun, self.results = 0, {}, []

    def source(self, lengths):
        for index, (prompt, new) in enumerate(lengths):
            ids = [(7 * place + index) % 150 + 2 for place in range(prompt)]
            request = {"input_ids": ids, "max_new_tokens": new, "streamer": self.streamer(index)}
            self.requests.append(self.reader.read(request, index))
            yield self.requests[-1]

    def round(self):
        with selected(self.model), torch.no_grad():
            more = self.scheduler.advance()
        self.rounds += 1
        for each in self.scheduler.decoding:
            self.begun.setdefault(each.request.index, self.rounds)
        self.results += self.scheduler.take_finished()
        return more

    def free(self):
        self.scheduler.free()


@pytest.mark.parametrize("look_ahead", [1, 4])
def test_what_fits_is_let_in(models, look_ahead):
    """The second request must wait for the first one; the third fits beside it. Texts are those of transformers."""
    run = Run(models, [(40, 150), (200, 60), (20, 5)], look_ahead)
    while run.round():
        pass
    assert [result.index for result in run.results] == ([0, 2, 1] if look_ahead == 1 else [2, 0, 1])
    for result in run.results:
        ids = torch.tensor([result.prompt_ids])
        new = len(result.generated_tokens)
        out = run.theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        assert out[0, ids.shape[1] :].tolist() == result.generated_tokens
    run.free()


def test_nobody_is_overtaken_for_ever(models):
    """A long request that does not fit beside the first one, and short ones without end."""
    run = Run(models, itertools.chain([(20, 150), (200, 60)], itertools.repeat((20, 20))), look_ahead=8)
    while 1 not in run.begun:
        assert run.round()
        assert run.rounds < 2000
    assert 0 < sum(result.index > 1 for result in run.results) <= 2 * ROWS
    run.free()


def test_short_prompts_pass_long_ones_that_go_on(models):
    """While a long prompt is read, a short one has its answer at once, and a next one is there always. At least every second
    round reads a chunk of the long one."""
    chunks = 12
    run = Run(models, itertools.chain([(chunks * CHUNK, 4)], itertools.repeat((60, 1))), 1, tokens=1000)
    assert run.round()
    assert [result.index for result in run.results] == [1]
    while 0 not in run.begun:
        assert run.round()
        assert run.rounds <= 2 * chunks
    assert sum(result.index > 0 for result in run.results) >= chunks - 1
    run.free()


def test_long_prompts_without_short_ones_are_read_in_order(models):
    run = Run(models, [(5 * CHUNK, 4), (4 * CHUNK, 4)], 1, tokens=1000)
    while run.round():
        pass
    assert run.begun == {0: 5, 1: 9}
    run.free()


class Device:
    """A GPU that has not done the last thing that it was given. `events` says what happens in which order."""

    def __init__(self, scheduler, events):
        self.given, self.events = 0, events
        scheduler._tokens_arrive_late = True
        scheduler._send_to_cpu = lambda sequences, drawn: _Pending(
            sequences, drawn, drawn.sent, drawn.logprobs, Arrival(self)
        )

    def begin(self):
        self.given += 1


class Arrival:
    def __init__(self, device):
        self.device, self.number = device, device.given

    def query(self):
        return self.device.given > self.number

    def synchronize(self):
        if not self.query():
            self.device.events.append("wait")


@pytest.mark.parametrize("kind", ["CPU", "GPU", "GPU, and a store"])
def test_a_first_token_is_delivered_while_other_prompts_are_read(models, monkeypatch, kind):
    """Three prompts fit into a chunk, so they are read one after the other before a step is taken. On a GPU nothing waits
    between them, and a token is there when the next thing has begun: at once where a store waits for the GPU."""
    events: list[str] = []

    class Streamer:
        def __init__(self, index):
            self.index = index

        def put(self, value):
            if value.numel() == 1:
                events.append(f"token of {self.index}")

        def end(self):
            pass

    run = Run(models, [(20, 2), (19, 2), (18, 1)], 1, streamer=Streamer)
    device = None if kind == "CPU" else Device(run.scheduler, events)

    def watched(name, of):
        def call(*args):
            events.append(name)
            if device is not None:
                device.begin()
            return of(*args)

        return call

    if device is not None and kind != "GPU":
        monkeypatch.setattr(run.scheduler.kept, "add", lambda row, ids: device.begin())
    for name in ("prefill", "decode"):
        monkeypatch.setattr(run.scheduler.steps, name, watched(name, getattr(run.scheduler.steps, name)))
    while run.round():
        pass
    assert {result.index: len(result.generated_tokens) for result in run.results} == {0: 2, 1: 2, 2: 1}
    first = [
        "prefill",
        "token of 0",
        "prefill",
        "token of 1",
        "prefill",
        "token of 2",
        "decode",
        "token of 0",
        "token of 1",
    ]
    delivered_late = [
        "prefill",
        "prefill",
        "token of 0",
        "prefill",
        "token of 1",
        "decode",
        "token of 2",
        "wait",
        "token of 0",
        "token of 1",
    ]
    store = [*first[:7], "wait", *first[7:]]
    assert events == {"CPU": first, "GPU": delivered_late, "GPU, and a store": store}[kind]
    run.free()


def test_a_request_that_fails_before_its_chunk_is_read_ends_alone(models, monkeypatch):
    """Memory runs out while it begins with a prefix."""
    run = Run(models, [(40, 5), (20, 5)], 1)
    outcomes = itertools.chain([torch.OutOfMemoryError("no memory")], itertools.repeat(None))
    monkeypatch.setattr(run.scheduler, "_look_for_prefix", Mock(side_effect=outcomes))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        run.round()
    run.scheduler.fail(raised.value)
    while run.round():
        pass
    failed, other = sorted(run.results, key=lambda result: result.index)
    assert (failed.error, other.error, len(other.generated_tokens)) == ("OutOfMemoryError: no memory", None, 5)
