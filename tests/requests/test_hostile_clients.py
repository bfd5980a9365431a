"""The server beside bad requests: each ends by itself, and a good stream continues."""

import gc
import json
import random
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
import transformers
from processes import free_port
from served_here import ANCHOR, ENDLESS, MOST_OPEN, ROWS, TOOLS, Here, Stream, chat, save, text_of, writes

from hf_lowbit_kv.requests.server import answer_text, clients, handlers, openai_server

#: logs of errors that these tests cause
pytestmark = pytest.mark.filterwarnings("ignore:Unfeasible length constraints")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile")
    save(path)
    return path


@pytest.fixture(scope="module")
def here(folder):
    server = Here(folder)
    yield server
    server.close()


@pytest.fixture
def stream(here):
    one = Stream(here)
    yield one
    one.goes_on()
    one.close()
    here.wait(lambda: here.rows() == 0)


def settings(**values):
    return chat(generation_config=json.dumps({"max_new_tokens": 2, **values}))


def variables(**values):
    return chat(chat_template_kwargs=values)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
#: requests that must not be served, and the field that the answer names
BAD = {
    "a program of loops": (variables(chat_template=LOOPS), "chat_template_kwargs"),
    "a program that takes memory": (variables(chat_template=DOUBLES), "chat_template_kwargs"),
    "padding": (variables(padding="max_length", max_length=10**8), "chat_template_kwargs"),
    "a global": (variables(raise_exception=1), "chat_template_kwargs"),
    "ngrams of the prompt": (settings(encoder_no_repeat_ngram_size=10**9), "generation_config"),
    "a watermark": (settings(watermarking_config={"seeding_scheme": "selfhash"}), "generation_config"),
    "beams": (settings(num_beams=2), "generation_config"),
    "many bad words": (settings(bad_words_ids=[[1, 2]] * 17), "generation_config"),
    "bad words of other models": (settings(bad_words_ids=[[10**6]]), "generation_config"),
    "a small temperature": (settings(temperature=1e-300, do_sample=True), "generation_config"),
    "half a character in a setting": (settings(**{"\ud800": 1}), "generation_config"),
    "a long list": (chat(generation_config=json.dumps({"eos_token_id": [1] * 10**5})), "generation_config"),
    "many stops": (chat(stop=["a"] * 17), "stop"),
    "a long stop": (chat(stop="a" * 257), "stop"),
    "many messages": (chat(messages=[{"role": "user", "content": "5"}] * 2049), "messages"),
    "many tools": (chat(tools=TOOLS * 129), "tools"),
    "a tool that must be called": (chat(tools=TOOLS, tool_choice="required"), "tool_choice"),
    "a long prompt": (chat("5 " * 3_600_000), "messages"),
    "a prompt of many tokens": (chat("5 " * 1_500_000), "messages"),
    "too many tokens": (chat(max_tokens=10**6), None),
    "half a character": (chat("\ud83d"), None),
    "more than a float": (chat(temperature=10**400), "temperature"),
    "NaN": ('{"messages": [{"role": "user", "content": "5"}], "top_p": NaN}', None),
    "nested deeply": ('{"messages": ' + "[" * 100_000, None),
    "a number of 5000 digits": ('{"max_tokens": ' + "9" * 5000 + "}", None),
    "another role": (chat(messages=[{"role": "system", "content": "5"}]), None),
    "arguments that are no JSON": (
        chat(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
        None,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused(here, stream, name):
    body, field = BAD[name]
    status, answer = here.ask(body)
    assert status == 400, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert error["message"]
    assert len(error["message"]) < 1500


@pytest.mark.parametrize("field", [{"suffix": "ZZZ"}, {"echo": True}, {"n": 2}, {"logprobs": 0}], ids=str)
def test_fields_of_completions_that_would_change_the_text(here, field):
    """A suffix asks for the text before it. At values without an effect the fields are taken."""
    body = {"prompt": "5 6 7", "max_tokens": 2, "temperature": 0}
    (name,) = field
    status, answer = here.ask({**body, **field}, "/v1/completions")
    assert (status, answer["error"]["param"]) == (400, name)
    usual = {"suffix": "", "echo": False, "best_of": 1, "n": 1, "presence_penalty": 0}
    assert here.ask({**body, **usual}, "/v1/completions")[0] == 200


@pytest.mark.parametrize(
    "text",
    ['<tool_call>{"name": "now"}', "<tool_call>[1, 2]", "<tool_call>{oops</tool_call>"],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_call_that_is_none_is_text(here, stream, text, streamed):
    status, answer = here.ask(chat(**writes(text), max_tokens=1, stream=streamed))
    assert (status, text_of(answer)) == (200, text)


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_calls(here, streamed, caplog):
    """Two are two; with tool_choice="none" they are text, and the prompt has no tools."""
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    _, answer = here.ask(chat(**writes(call), max_tokens=2, tools=TOOLS, stream=streamed))
    choices = [each["choices"][0] for each in answer] if streamed else [answer["choices"][0]]
    parts = [each["delta" if streamed else "message"] for each in choices]
    calls = [each["function"] for part in parts for each in part.get("tool_calls") or []]
    assert calls == [{"name": "f", "arguments": '{"a": 1}'}] * 2
    assert choices[-1]["finish_reason"] == "tool_calls"
    _, answer = here.ask(chat(**writes(call), max_tokens=2, tools=TOOLS, tool_choice="none", stream=streamed))
    assert text_of(answer) == call * 2
    usage = (answer[-1] if streamed else answer)["usage"]
    assert usage["prompt_tokens"] == 4
    assert "tool_choice" not in caplog.text, "it is honoured, so nothing is logged"


def test_tools_for_a_template_without_tools(here, monkeypatch):
    tokenizer = here.models.load_model_and_processor(here.models.process_model_name(here.models.force_model))[1]
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content }}")
    status, answer = here.ask(chat(tools=TOOLS))
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert "has none" in answer["error"]["message"]


def both(here, **options):
    """Text and reason to end of a whole answer, which are those of the stream too."""
    _, whole = here.ask(chat(**options))
    _, events = here.ask(chat(**options, stream=True))
    assert text_of(whole) == text_of(events)
    assert whole["choices"][0]["finish_reason"] == events[-1]["choices"][0]["finish_reason"]
    assert whole["usage"] == events[-1]["usage"]
    return text_of(whole), whole["choices"][0]["finish_reason"]


def test_streamed_and_whole_answers_are_alike(here):
    """A stop text; a text cut inside a character; white space at the edges; a stop text that never comes."""
    assert both(here, **writes("one END two"), stop="END", max_tokens=ENDLESS) == ("one", "stop")
    assert both(here, **writes("<think>"), stop="<think>", max_tokens=ENDLESS) == ("", "stop")
    assert both(here, **writes("one END two"), stop="ENDE", max_tokens=2) == ("one END two" * 2, "length")
    assert both(here, **writes("<0xE2>"), max_tokens=1) == ("", "length")
    assert both(here, **writes("é"), max_tokens=2) == ("éé", "length")
    assert both(here, **writes("\n\n"), max_tokens=2) == ("", "length")


@pytest.mark.parametrize("stop", [{"stop": ANCHOR}, {"generation_config": json.dumps({"stop_strings": [ANCHOR]})}])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_special_token_as_a_stop_text(here, route, stop):
    body = {**chat(), "prompt": "5 6 7", "logit_bias": {"159": 100}, "temperature": 0, "max_tokens": 20, **stop}
    del body["messages" if route == "/v1/completions" else "prompt"]
    status, answer = here.ask(body, route)
    assert (status, answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == (200, "stop", 1)


def test_top_p_of_1_does_not_sample(here):
    greedy = [text_of(here.ask(chat(max_tokens=8, top_p=top_p))[1]) for top_p in (1, 1.0, 1, 1)]
    assert len(set(greedy)) == 1
    assert len({text_of(here.ask(chat(max_tokens=8, top_p=0.99, seed=seed))[1]) for seed in range(3)}) == 3


def test_a_variable_of_the_template_is_taken(here):
    tokens = [here.ask(body)[1]["usage"]["prompt_tokens"] for body in (chat(), variables(fast=True))]
    assert tokens == [4, 5]


# ---- errors inside ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_in_a_step_ends_the_requests_of_the_step(here, monkeypatch, streamed):
    """Reading a prompt, and a step of all rows. Its message has a newline and a quote."""
    for method in ("decode", "prefill"):
        original, calls = getattr(here.scheduler.steps, method), []

        def once(*args, original=original, calls=calls):
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError('one\n"two"')
            return original(*args)

        monkeypatch.setattr(here.scheduler.steps, method, once)
        status, answer = here.ask(chat(stream=streamed))
        error = answer[-1]["error"] if streamed else answer["error"]
        assert status == (200 if streamed else 500)
        assert (error["message"], error["type"]) == ('RuntimeError: one\n"two"', "server_error")
        assert here.ask(chat(**writes("é"), max_tokens=2))[0] == 200
        assert here.rows() == 0
        monkeypatch.undo()


def spoil(monkeypatch, name):
    """Let a method of streamers that are made from now on, or of their parser or `StopStrings`, raise an error."""
    original = answer_text.AnswerStreamer.__init__
    part, _, method = name.rpartition(".")

    def bad(*args, **kwargs):
        raise OSError("bad")

    def begin(self, *args, **kwargs):
        original(self, *args, **kwargs)
        setattr(getattr(self, part) if part else self, method, bad)

    monkeypatch.setattr(answer_text.AnswerStreamer, "__init__", begin)


@pytest.mark.parametrize("name", ["_take", "_send_events", "_finish", "_parser.feed", "_parser._process", "_text.add"])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_in_an_answer_ends_this_request(here, stream, monkeypatch, name, streamed):
    spoil(monkeypatch, name)
    status, answer = here.ask(chat(max_tokens=2, stream=streamed))
    error = answer[-1]["error"] if streamed else answer["error"]
    assert "bad" in error["message"]
    assert status == (200 if streamed else 500)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_result_that_is_not_taken(here, stream, monkeypatch, caplog, streamed):
    spoil(monkeypatch, "complete" if streamed else "enqueue")
    connection = here.send(chat(max_tokens=2, stream=streamed))
    here.wait(lambda: "was not taken" in caplog.text)
    connection.close()


def test_a_loop_that_cannot_go_on_ends_the_server(folder, monkeypatch, caplog):
    """Its clients get an error, and the server's process ends with an error."""
    made, urls, errors = [], [], []

    class Loop(openai_server.RequestLoop):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    def run():
        try:
            openai_server.serve(
                str(folder), "dense", "127.0.0.1", free, max_rows=2, memory=120_000_000, device="cpu",
                ready=urls.append, say=lambda _: None,
            )  # fmt: skip
        except RuntimeError as error:
            errors.append(error)

    free = free_port()
    monkeypatch.setattr(openai_server, "RequestLoop", Loop)
    thread = threading.Thread(target=run)
    thread.start()
    client = Here.__new__(Here)
    client.port = free
    client.wait(lambda: urls and made)
    assert urls[0]["model"] == folder.name
    client.wait(lambda: reachable(free))

    def broken():
        raise RuntimeError("the device is gone")

    streams = [client.send(chat(max_tokens=ENDLESS, stream=streamed)) for streamed in (True, False)]
    client.wait(lambda: len(made[0]._scheduler.decoding) == 2)
    monkeypatch.setattr(made[0]._scheduler, "_admit_waiting", broken)
    events, whole = [each.getresponse() for each in streams]
    assert whole.status == 503
    assert "the device is gone" in json.loads(whole.read())["error"]["message"]
    assert b"the device is gone" in events.read()
    thread.join(30)
    assert not thread.is_alive()
    assert "the device is gone" in str(errors[0])
    assert any(record.levelname == "CRITICAL" for record in caplog.records)
    for each in streams:
        each.close()


def reachable(port):
    with socket.socket() as each:
        return each.connect_ex(("127.0.0.1", port)) == 0


# ---- clients that wait, leave, or are slow ----------------------------------------------------------------------------


def test_a_short_prompt_does_not_wait_for_long_ones(here, stream):
    """It is read within two chunks, and its answer begins while the long prompts are read."""
    long = [here.send(chat(" ".join(["5"] * 2000), max_tokens=1)) for _ in range(2)]
    here.wait(lambda: len(here.scheduler.prefilling) == 2)
    before = here.steps()
    status, _ = here.ask(chat(max_tokens=1))
    rounds = here.steps() - before  # the stream takes a step in each round
    assert status == 200
    assert here.scheduler.prefilling, "the long prompts were faster"
    assert rounds < 20
    assert {each.getresponse().status for each in long} == {200}
    for each in long:
        each.close()


def test_more_requests_than_may_wait(here, stream):
    waiting = [here.send(chat(max_tokens=ENDLESS)) for _ in range(MOST_OPEN - 1)]
    here.wait(lambda: here.rows() == ROWS and len(here.loop._tickets) == MOST_OPEN)
    status, answer = here.ask(chat())
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (
        429,
        "rate_limit_exceeded",
        "rate_limit_error",
    )
    for each in waiting:
        each.close()
    here.wait(lambda: here.rows() == 1)
    assert here.ask(chat())[0] == 200


def test_unfinished_bodies_keep_nobody_out(here, stream, monkeypatch):
    """They are no open requests. Beyond a number of them, or of their bytes, the oldest is given up."""

    def unfinished(body: bytes):
        client = connected(here)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 999999\r\n\r\n" + body)
        here.wait(lambda: sum(here.app._bodies.values()) >= len(body))
        return client

    slow = [unfinished(b"{") for _ in range(MOST_OPEN)]
    assert here.ask(chat())[0] == 200
    monkeypatch.setattr(clients, "BODIES", MOST_OPEN)
    slow.append(unfinished(b""))
    assert b" 408 " in slow[0].recv(2000)
    monkeypatch.setattr(clients, "BODIES_BYTES", 60_000)
    slow.append(unfinished(b"{" * 50_000))
    slow.append(unfinished(b"{" * 50_000))
    assert all(b" 408 " in each.recv(2000) for each in slow[1:-1])
    for each in slow:
        each.close()
    here.wait(lambda: not here.app._bodies)


@pytest.mark.usefixtures("quick")
def test_slow_clients_are_closed(here, stream):
    """One sends nothing, one half of a request, one half of a body, one does not read its answer: its buffer is full."""
    slow = []
    for data in (b"", b"POST /v1/chat/comp", b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{"):
        slow.append(connected(here))
        slow[-1].sendall(data)
    deaf = connected(here)
    body = json.dumps(chat(**writes("Hello"), max_tokens=ENDLESS, stream=True)).encode()
    deaf.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n")
    deaf.sendall(b"content-length: %d\r\n\r\n" % len(body) + body)
    here.wait(lambda: here.rows() == 2)
    for each in slow:
        each.settimeout(20)
        received = each.recv(2000)
        assert received == b"" or b" 408 " in received
        each.close()
    here.wait(lambda: here.rows() == 1)
    deaf.close()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(clients, "SLOW", 1.0)


def connected(here):
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", here.port))
    return client


def test_idle_connections_give_way(here, stream, monkeypatch):
    from hf_lowbit_kv.requests.server.clients import SlowClients

    monkeypatch.setattr(here.server, "_slow", SlowClients(-250))  # six stay
    idle = [connected(here) for _ in range(12)]
    here.wait(lambda: len(here.server.server_state.connections) <= 6)
    assert here.ask(chat())[0] == 200
    for each in idle:
        each.close()


def leave(here, rng):
    """Ask for a long answer in some way, and leave in some state of it."""
    body = json.dumps(chat(" ".join(["5"] * rng.choice((3, 300, 3000))), max_tokens=ENDLESS, stream=rng.random() < 0.5))
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    data = (head + body).encode()
    state = rng.choice(("in the headers", "in the body", "at once", "soon", "later", "reading"))
    client = connected(here)
    try:
        if state == "in the headers":
            client.sendall(data[: len(head) // 2])
        elif state == "in the body":
            client.sendall(data[: len(head) + 5])
        else:
            client.sendall(data)
            if state == "reading":
                client.settimeout(rng.choice((0.01, 0.1)))
                client.recv(2000)
            elif state != "at once":
                time.sleep(rng.uniform(0, 0.02 if state == "soon" else 0.2))
    except TimeoutError:
        pass
    finally:
        if rng.random() < 0.3:  # a reset instead of an end
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()


def all_left(here):
    return here.rows() == 0 and not here.loop._tickets and not here.server.server_state.tasks


def check_disconnects(here, count):
    rng = random.Random(count)
    seeds = [rng.random() for _ in range(count)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda seed: leave(here, random.Random(seed)), seeds))
    here.wait(lambda: all_left(here), 60)
    assert here.ask(chat())[0] == 200


def test_clients_that_leave_free_their_rows(here):
    here.wait(lambda: all_left(here))
    check_disconnects(here, 60)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_before_its_request_is_submitted(here, monkeypatch, streamed):
    """It leaves while its prompt is made in a worker thread."""
    here.wait(lambda: all_left(here))
    original, making, go_on, made = handlers.ChatHandler._prompt, threading.Event(), threading.Event(), []

    def slow(self, body):
        making.set()
        assert go_on.wait(20)
        made.append(original(self, body))
        return made[-1]

    monkeypatch.setattr(handlers.ChatHandler, "_prompt", slow)
    connection = here.send(chat(max_tokens=ENDLESS, stream=streamed))
    assert making.wait(20)
    connection.close()
    here.wait(lambda: not len(here.app.manager))
    go_on.set()
    here.wait(lambda: made)
    assert here.ask(chat(max_tokens=1))[0] == 200
    here.wait(lambda: all_left(here), 5)


@pytest.mark.slow
def test_memory_after_many_disconnects(here):
    """600 in every state leave no row busy; 600 more take no memory."""
    check_disconnects(here, 600)
    gc.collect()
    tracemalloc.start()
    try:
        check_disconnects(here, 100)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        check_disconnects(here, 500)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    print(f"{grown} bytes after 500 disconnects")
    assert grown < 300_000


# ---- random settings --------------------------------------------------------------------------------------------------

NUMBERS = (
    *(0, 1, -1, 2, 0.5, 0.0, 1.0, -0.5, 1e-300, 1e300, 1e9, 10**9, 2**31, 2**63, 10**400, float("inf")),
    float("nan"),
)


def any_value(rng, depth=0):
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind == 3:
        return rng.choice((True, False, None))
    if kind == 4:
        return rng.choice(("", "a", "7", "static", "hybrid", "\n", "never", "a" * 300))
    if kind == 5:
        return rng.randrange(200)
    if kind == 6:
        return {str(rng.randrange(200)): any_value(rng, depth + 1) for _ in range(rng.randrange(3))}
    return [any_value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 2, 70)))]


def any_settings(rng):
    """Values that are often of the right type, so that many reach the model."""
    good = {
        "temperature": lambda: rng.choice((0.5, 1.0, 1e-5, 100)),
        "top_k": lambda: rng.randrange(200),
        "top_p": lambda: rng.choice((0.1, 0.5, 1.0)),
        "min_p": lambda: rng.random(),
        "typical_p": lambda: rng.random(),
        "epsilon_cutoff": lambda: rng.random(),
        "eta_cutoff": lambda: rng.random(),
        "repetition_penalty": lambda: rng.choice((0.01, 0.5, 1.0, 100)),
        "do_sample": lambda: rng.random() < 0.7,
        "renormalize_logits": lambda: rng.random() < 0.5,
        "min_new_tokens": lambda: rng.randrange(4),
        "eos_token_id": lambda: rng.sample(range(160), rng.randrange(1, 64)),
        "suppress_tokens": lambda: rng.sample(range(160), rng.randrange(1, 64)),
        "bad_words_ids": lambda: [rng.sample(range(160), rng.randrange(1, 4)) for _ in range(rng.randrange(1, 16))],
        "stop_strings": lambda: rng.choice(("5", ["Hello", "7"])),
        "max_time": lambda: rng.choice((0.0, 1.0)),
    }
    names = [name for name in vars(transformers.GenerationConfig()) if name != "max_new_tokens"]
    values = {}
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice(list(good)) if rng.random() < 0.7 else rng.choice(names)
        values[name] = good[name]() if name in good and rng.random() < 0.7 else any_value(rng)
    return values


def check_settings(here, count):
    rng = random.Random(count)
    every = [any_settings(rng) for _ in range(count)]
    options = [{"stream": True} if rng.random() < 0.3 else {} for _ in every]

    def ask(pair):
        values, more = pair
        return here.ask(settings(**values) | more)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, zip(every, options, strict=True)))
    for values, (status, answer) in zip(every, answers, strict=True):
        assert status in (200, 400), (values, answer)
        if isinstance(answer, list):
            assert "error" not in answer[-1], (values, answer)
    served = sum(status == 200 for status, _ in answers)
    print(f"{served} of {count} settings are served")
    assert count // 5 < served < count


def test_random_settings_are_served_or_refused(here, stream):
    check_settings(here, 150)


@pytest.mark.slow
def test_thousands_of_random_settings(here, stream):
    check_settings(here, 2000)
