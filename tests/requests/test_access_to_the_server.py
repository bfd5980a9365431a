"""Who may ask the server, by which names, and what comes back with an answer."""

import http.client
import json

import pytest
from served_here import Here, chat, save

from hf_lowbit_kv.cli import main
from hf_lowbit_kv.requests.server.openai_server import served_name

KEY, PAGE = "sk-secret-ü", "https://page.example"
OK = {"authorization": f"Bearer {KEY}".encode()}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("access")
    save(folder)
    server = Here(folder, api_key=KEY, allow_origins=[PAGE])
    yield server
    server.close()


def answer(here, method, route, headers=None, body=None):
    """Status, headers, and the body in JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=60)
    connection.request(method, route, body, {"content-type": "application/json", **(headers or {})})
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, response.headers, json.loads(text) if text.startswith(b"{") else text


@pytest.mark.parametrize("sent", [None, "Bearer sk-secret", f"Basic {KEY}", f"Bearer {KEY}x", KEY, "Bearer "])
def test_a_key_is_needed(here, caplog, capfd, sent):
    headers = {} if sent is None else {"authorization": sent.encode()}
    for method, route in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("POST", "/v1/responses")):
        status, _, body = answer(here, method, route, headers, json.dumps(chat()))
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert answer(here, "GET", "/health", headers)[0] == 200
    assert answer(here, "GET", "/v1/models", OK)[0] == 200
    assert answer(here, "POST", "/v1/chat/completions", OK, json.dumps(chat()))[0] == 200
    shown = caplog.text + "".join(capfd.readouterr())
    assert "sk-secret" not in shown


def test_the_clients_request_id_comes_back(here):
    """Not where it is too long for a header; with errors too. Two clients may send the same one."""
    body = json.dumps(chat())
    for sent, status in (("mine", 200), ("mine", 200)):
        found = answer(here, "POST", "/v1/chat/completions", {**OK, "x-request-id": sent}, body)
        assert (found[0], found[1].get_all("x-request-id")) == (status, ["mine"])
    assert answer(here, "POST", "/v1/completions", {"x-request-id": "mine"}, b"{}")[1]["x-request-id"] == "mine"
    assert answer(here, "POST", "/v1/completions", {**OK, "x-request-id": "mine"}, b"{")[1]["x-request-id"] == "mine"
    for sent in ({}, {"x-request-id": "a" * 300}):
        assert len(answer(here, "POST", "/v1/chat/completions", {**OK, **sent}, body)[1]["x-request-id"]) == 36


def test_scripts_of_web_pages(here, tmp_path):
    """Of the allowed page, before and with a request, and with an error; of no other page, and of none by default."""
    asks = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    status, headers, _ = answer(here, "OPTIONS", "/v1/chat/completions", asks)
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    for sent in ({}, OK):
        headers = answer(here, "POST", "/v1/chat/completions", {"origin": PAGE, **sent}, json.dumps(chat()))[1]
        assert headers["access-control-allow-origin"] == PAGE
    headers = answer(here, "GET", "/v1/models", {"origin": "https://other.example", **OK})[1]
    assert headers["access-control-allow-origin"] is None


def test_names_of_the_model(here, tmp_path, monkeypatch):
    (listed,) = answer(here, "GET", "/v1/models", OK)[2]["data"]
    assert listed["id"].startswith("access")
    for name, expected in ((listed["id"], 200), (here.models.force_model, 200), ("other", 404), (5, 404)):
        status, _, body = answer(here, "POST", "/v1/chat/completions", OK, json.dumps(chat(model=name)))
        assert status == expected
        if status == 200:
            assert body["model"] == listed["id"]
        else:
            assert body["error"]["code"] == "model_not_found"
            assert str(tmp_path.parent) not in body["error"]["message"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    assert [served_name(name) for name in ("my-model", "./my-model/")] == ["my-model", "my-model"]
    assert served_name("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


def test_a_model_by_its_name(here, monkeypatch):
    """A hub name has a slash, which some clients encode."""
    (listed,) = answer(here, "GET", "/v1/models", OK)[2]["data"]
    assert answer(here, "GET", f"/v1/models/{listed['id']}", OK)[::2] == (200, listed)
    status, _, body = answer(here, "GET", "/v1/models/other", OK)
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert answer(here, "GET", f"/v1/models/{listed['id']}")[0] == 401
    monkeypatch.setattr(here.models, "served", "Qwen/Qwen3-8B")
    for name in ("Qwen/Qwen3-8B", "Qwen%2FQwen3-8B"):
        assert answer(here, "GET", f"/v1/models/{name}", OK)[2]["id"] == "Qwen/Qwen3-8B"


def test_an_empty_key_is_no_key(capsys):
    with pytest.raises(SystemExit, match="1"):
        main(["serve", "--api-key", ""])
    assert "--api-key '' is not allowed" in capsys.readouterr().err
