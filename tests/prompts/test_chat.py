"""Chats: each turn sends what is new, and says what a chat says that reads everything."""

import copy
import threading

import pytest
from accelerate import cpu_offload
from cases import SMALL_PAGES, Counted, tiny_models
from chat_cases import PLAIN, tokenizer_of, words
from tiny_tokenizers import letters
from transformers import BloomConfig, Gemma3Config, GenerationConfig, GPT2Config, LlamaConfig

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache import cache_contents, saved_cache
from hf_lowbit_kv.cache.served_models import longest_text

DENSE = {"cache_options": {"key_format": "dense", "value_format": "dense", **SMALL_PAGES}, "do_sample": False}
#: forgets all but the last words of earlier answers
REWRITES = PLAIN.replace(
    "{{ m['content'] }}", "{{ m['content'].split()[-2:] | join(' ') if m['role'] == 'assistant' else m['content'] }}"
)


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama")[0]


def _chat(model, template=PLAIN, **options):
    return lb.Chat(model, tokenizer_of(template), "kivi-4", max_length=600, max_new_tokens=10, **DENSE, **options)


def _fresh(model, chat, text, template=PLAIN):
    """What a chat answers that reads the whole conversation at once."""
    other = _chat(model, template)
    other.messages = [dict(message) for message in chat.messages]
    return other.send(text)


@pytest.mark.host
@pytest.mark.parametrize("template", [PLAIN, REWRITES], ids=["plain", "rewrites"])
def test_turns_undo_and_edited_messages(model, template):
    chat = _chat(model, template, system=words(60, 0))
    for turn in range(3):
        text = words(20, turn + 1)
        want = _fresh(model, chat, text, template)
        assert chat.send(text) == want
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 3]
    chat.undo()
    assert chat.send(text) == want  # all of it is stored
    chat.undo()
    assert len(chat.messages) == 5
    text = words(30, 9)
    assert _fresh(model, chat, text, template) == chat.send(text)
    chat.messages[3]["content"] = words(15, 10)
    text = words(5, 11)
    assert _fresh(model, chat, text, template) == chat.send(text)
    assert "of 600 tokens" in repr(chat)


@pytest.mark.host
def test_a_turn_sends_what_follows_the_common_prefix(model):
    chat, counted = _chat(model, system=words(60, 0)), Counted(model)
    for turn in range(3):
        held = 0 if chat.cache.text is None else chat.cache.text[0].tolist()
        text = words(20, turn + 1)
        ids = chat._begin(text).ids[0].tolist()
        common = next((i for i, pair in enumerate(zip(held, ids)) if pair[0] != pair[1]), len(held)) if held else 0
        counted.taken()
        chat.send(text)
        assert counted.taken() == len(ids) - common + 9
        assert turn == 0 or common > 60


@pytest.mark.parametrize("family", ["gemma2", "qwen3_next"])
def test_models_that_cannot_crop(family):
    model, _ = tiny_models(family)
    counted = Counted(model)
    chat = _chat(model, system=words(60, 0))
    chat.send(words(20, 1))
    chat.send(words(20, 2))
    chat.undo()
    text = words(20, 3)
    whole = chat._begin(text).ids.shape[1]
    counted.taken()
    answer = chat.send(text)
    assert counted.taken() < whole  # from the end of the first turn
    assert answer == _fresh(model, _before(chat), text)
    chat.messages[0]["content"] = words(50, 8)
    with pytest.warns(UserWarning, match="conversation is read again"):
        chat.send(words(5, 4))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_copy_continues_in_its_own_way(family):
    model, _ = tiny_models(family)
    chat = _chat(model, system=words(60, 0))
    chat.send(words(20, 1))
    other = copy.deepcopy(chat)
    assert other.model is chat.model
    texts = words(20, 2), words(20, 3)
    want = [_fresh(model, chat, text) for text in texts]
    counted = Counted(model)
    assert [each.send(text) for each, text in zip((chat, other), texts, strict=True)] == want
    assert counted.taken() < chat._begin("").ids.shape[1]  # both turns together: the first turn was not read again
    chat.undo()
    assert (len(chat.messages), len(other.messages)) == (3, 5)
    for _ in chat.stream(words(20, 4)):
        with pytest.raises(RuntimeError, match="still writing an answer"):
            copy.deepcopy(chat)
        break


def _before(chat):
    class Earlier:
        messages = chat.messages[:-2]

    return Earlier


@pytest.mark.host
def test_stream(model):
    chat, other = _chat(model), _chat(model)
    text = words(20, 1)
    assert "".join(chat.stream(text)).split() == other.send(text).split()
    assert chat.messages == other.messages
    for _ in chat.stream(words(20, 2)):
        break  # what was written stays
    assert len(chat.messages) == 4
    text = words(5, 3)
    want = _fresh(model, chat, text)
    assert chat.send(text) == want


def test_an_interrupted_answer_is_the_turn(model):
    chat, calls = _chat(model), []
    chat.send(words(20, 1))

    def interrupt(module, args):
        calls.append(module)
        if len(calls) == 5:
            raise KeyboardInterrupt

    with model.model.layers[1].register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
        chat.send(words(20, 2))
    assert (len(chat.messages), chat.finish_reason) == (4, "cancelled")
    assert 1 <= len(chat.messages[-1]["content"].split()) <= 4
    text = words(5, 3)
    want = _fresh(model, chat, text)
    assert chat.send(text) == want


def test_an_interruption_before_the_answer_leaves_the_cache_its_text(model, monkeypatch):
    """The turn after it reads again what an edited message has changed."""
    chat = _chat(model)
    chat.send(words(30, 1))
    chat.messages[0]["content"] = words(30, 2)

    def interrupt(*_):
        raise KeyboardInterrupt

    for start in (chat.send, lambda text: next(chat.stream(text))):
        with monkeypatch.context() as patch:
            patch.setattr(lb.LowBitCache, "why_another_model", interrupt)
            with pytest.raises(KeyboardInterrupt):
                start(words(40, 3))
        assert len(chat.messages) == 2
    text = words(40, 3)
    want = _fresh(model, chat, text)
    assert chat.send(text) == want


def test_no_message_is_sent_while_the_cache_is_copied(model, tmp_path, monkeypatch):
    """The file has the messages of its cache, also if others are sent while it is written."""
    chat, write, take = _chat(model), saved_cache.write, cache_contents.take
    chat.send(words(20, 1))

    def busy(cache):
        with pytest.raises(RuntimeError, match="still writing"):
            chat.send(words(5, 2))
        return take(cache)

    def late(*arguments):
        chat.send(words(5, 2))
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(cache_contents, "take", busy)
        patch.setattr(saved_cache, "write", late)
        chat.save(tmp_path)
    loaded = lb.Chat.load(tmp_path, model, tokenizer_of())
    assert (len(loaded.messages), len(chat.messages)) == (2, 4)


@pytest.mark.host
def test_files(model, tmp_path):
    chat, counted = _chat(model, system=words(60, 0)), Counted(model)
    chat.send(words(20, 1))
    chat.save(tmp_path)
    again = lb.Chat.load(tmp_path, model, tokenizer_of())
    assert again.messages == chat.messages
    text = words(20, 2)
    counted.taken()
    answer = chat.send(text)
    sent = counted.taken()
    assert again.send(text) == answer
    assert counted.taken() == sent
    chat.cache.save_pretrained(tmp_path / "cache")
    with pytest.raises(ValueError, match="holds a cache, and no chat"):
        lb.Chat.load(tmp_path / "cache", model, tokenizer_of())


def test_a_chat_saved_while_another_is_loaded_does_not_mix_with_it(model, tmp_path, monkeypatch):
    chat = _chat(model)
    chat.send(words(20, 1))
    chat.save(tmp_path)
    messages, stored, of_saved = list(chat.messages), int(chat.cache.get_seq_length()), lb.LowBitCache.of_saved

    def saves_first(*args, **options):
        chat.send(words(20, 2))
        chat.save(tmp_path)
        return of_saved(*args, **options)

    monkeypatch.setattr(lb.LowBitCache, "of_saved", saves_first)
    again = lb.Chat.load(tmp_path, model, tokenizer_of())
    assert (again.messages, int(again.cache.get_seq_length())) == (messages, stored)
    assert len(chat.messages) > len(messages)


def test_a_full_context_raises_before_reading(model):
    chat, counted = _chat(model), Counted(model)
    with pytest.raises(ValueError, match="max_length=600 leaves no room for an answer"):
        chat.send(words(600, 1))
    assert (counted.taken(), chat.messages) == (0, [])
    with pytest.raises(ValueError, match="there is nothing to undo"):
        chat.undo()


def test_no_chat_is_longer_than_the_model_was_made_for(model, tmp_path, monkeypatch):
    """The tiny model has 1024 positions."""
    counted = Counted(model)
    with pytest.raises(
        ValueError, match=r"max_length=1025 is not allowed: the model was made for .* at most 1024 tokens"
    ):
        lb.Chat(model, tokenizer_of(), max_length=1025)
    chat = lb.Chat(model, tokenizer_of(), **DENSE, max_new_tokens=3)
    assert chat.max_length == 1024
    chat.send(words(20, 1))
    chat.save(tmp_path)
    counted.taken()
    with pytest.raises(ValueError, match="max_length=2000 is not allowed"):
        lb.Chat.load(tmp_path, model, tokenizer_of(), max_length=2000)
    assert counted.taken() == 0
    rope = {**model.config.rope_parameters, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    monkeypatch.setattr(model.config, "rope_parameters", rope)
    assert lb.Chat(model, tokenizer_of(), max_length=2048).max_length == 2048
    with pytest.raises(ValueError, match="at most 2048 tokens"):
        lb.Chat(model, tokenizer_of(), max_length=2049)
    monkeypatch.setattr(model.config, "max_position_embeddings", 1 << 20)
    assert lb.Chat(model, tokenizer_of()).max_length == 32768


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (LlamaConfig(max_position_embeddings=500), 500),
        (
            LlamaConfig(
                max_position_embeddings=500, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}
            ),
            1500,
        ),
        (GPT2Config(n_positions=70), 70),
        (BloomConfig(), None),
        (Gemma3Config(text_config={"max_position_embeddings": 900}), 900),
        # as Google publishes Gemma 3: 131072 positions with the scaling of its layers without a window
        (Gemma3Config(text_config={"rope_scaling": {"rope_type": "linear", "factor": 8.0}}), 131072),
    ],
    ids=["llama", "linear", "gpt2", "no positions", "inside", "kinds of layers"],
)
def test_the_longest_text(config, longest):
    assert longest_text(config) == longest


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prefixes": lb.PrefixStore()}, ValueError, "prefixes=.* is not allowed: a chat sets it itself"),
        ({"tokenizer": "kivi-4-sink"}, TypeError, r"'kivi-4-sink' is a text; .*lb\.Chat\(model, tokenizer, preset\)"),
        ({"sytem": "x"}, ValueError, r"'sytem' is not known: .*option of lb\.Chat, .* did you mean 'system'\?"),
        ({"sink": 3}, ValueError, r"pass it as lb\.Chat\(\.\.\., cache_options=\{'sink'"),
    ],
)
def test_bad_arguments(model, options, error, message):
    with pytest.raises(error, match=message):
        lb.Chat(model, **{"tokenizer": tokenizer_of(), **options})


@pytest.mark.parametrize("messages", ["w1", [{}], [{"role": "user", "content": "w1"}, {"content": "w2"}]], ids=repr)
def test_messages_that_are_none_are_refused_before_reading(model, messages):
    """A template skips or misreads them."""
    chat, counted = _chat(model), Counted(model)
    chat.messages = messages
    for change in (lambda: chat.send("w1"), chat.undo):
        with pytest.raises(ValueError, match=r"chat\.messages\[\d\].* is not allowed"):
            change()
    assert counted.taken() == 0
    chat.messages = ()  # as good as a list
    assert chat.send(words(9, 1)) == _chat(model).send(words(9, 1))
    assert len(chat.messages) == 2


def test_one_answer_at_a_time(model, tmp_path):
    """While a stream is open its thread writes to the cache."""
    chat = _chat(model)
    pieces = chat.stream(words(20, 1))
    next(pieces)
    for other in (lambda: chat.send("w1"), lambda: next(chat.stream("w1")), chat.undo, lambda: chat.save(tmp_path)):
        with pytest.raises(RuntimeError, match="this chat is still writing an answer"):
            other()
    pieces.close()
    text = words(20, 2)
    want = _fresh(model, chat, text)
    assert chat.send(text) == want
    assert len(chat.messages) == 4


def test_what_load_changes_and_refuses(model, tmp_path):
    chat = _chat(model)
    for turn in range(2):
        chat.send(words(20, turn))
    chat.save(tmp_path / "chat")
    stored = int(chat.cache.get_seq_length())

    def load(**options):
        return lb.Chat.load(tmp_path / "chat", model, tokenizer_of(), **options)

    for options, message in (
        ({"max_length": 30}, f"max_length=30 is too small: .* has {stored} tokens"),
        ({"preset": "kv8"}, r"preset='kivi-4'.*kv8"),
        ({"cache_options": {"sink": 3}}, "cache_options is not allowed: a saved chat has its cache"),
        ({"system": "You are brief."}, "system is not allowed: a saved chat has its messages"),
    ):
        with pytest.raises(ValueError, match=message):
            load(**options)
    text = words(640, 9)
    with pytest.raises(ValueError, match="max_length=600 leaves no room"):
        load().send(text)
    larger = load(max_length=1000, max_new_tokens=4, chat_template_kwargs={"tools": None})
    assert (larger.max_length, larger.cache.packed_layers[0].length.capacity) == (1000, 1000)
    assert larger.chat_template_kwargs == {"tools": None}
    assert len(larger.send(text).split()) <= 4
    fresh = lb.Chat(model, tokenizer_of(), "kivi-4", max_length=1000, max_new_tokens=4, **DENSE)
    fresh.messages = larger.messages[:-2]
    assert fresh.send(text) == larger.messages[-1]["content"]
    assert int(load(max_length=stored + 40, max_new_tokens=2).cache.get_seq_length()) == stored


def test_an_option_that_cannot_be_saved_leaves_no_file(model, tmp_path):
    chat = _chat(model)
    chat.send(words(5, 1))
    chat.options["stopping_criteria"] = [len]
    with pytest.raises(TypeError, match="not JSON serializable"):
        chat.save(tmp_path / "chat")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_why_an_answer_ended(model, tmp_path):
    chat = _chat(model)
    assert chat.finish_reason is None
    answer = chat.send(words(20, 1)).split()
    assert (len(answer), chat.finish_reason) == (10, "length")
    chat.save(tmp_path)
    assert lb.Chat.load(tmp_path, model, tokenizer_of()).finish_reason == "length"
    chat.undo()
    assert chat.finish_reason is None
    third = tokenizer_of().convert_tokens_to_ids(answer[2])
    for ends in (third, [7, third]):
        other = _chat(model, eos_token_id=ends)
        assert (other.send(words(20, 1)).split()[-1], other.finish_reason) == (answer[2], "stop")
    other = _chat(model, max_time=1e-9)
    other.send(words(20, 1))
    assert other.finish_reason == "length"
    short = lb.Chat(model, tokenizer_of(), "kivi-4", max_length=30, **DENSE)
    short.send(words(20, 1))
    assert short.finish_reason == "length"


def test_stop_strings_need_no_tokenizer_of_their_own(model):
    options = {"max_length": 600, "max_new_tokens": 20, **DENSE}
    whole = lb.Chat(model, letters(), "kivi-4", **options).send("hello")
    stop = next(letter for letter in whole[2:] if letter.isalnum())
    chat = lb.Chat(model, letters(), "kivi-4", stop_strings=stop, **options)
    answer = chat.send("hello")
    assert chat.finish_reason == "stop"
    assert len(answer) < len(whole)
    assert whole.startswith(answer)
    assert stop in answer


def test_an_answer_that_is_left_is_cancelled(model):
    """The model waits for its third token until the loop has been left."""
    left, calls = threading.Event(), []

    def wait(module, args):
        calls.append(module)
        if len(calls) > 2:
            left.wait(0.2)

    chat = _chat(model)
    with model.model.layers[0].register_forward_pre_hook(wait):
        for _ in chat.stream(words(20, 1)):
            break
    assert (chat.finish_reason, len(calls) < 10) == ("cancelled", True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"generation_config": GenerationConfig(num_return_sequences=2, do_sample=True), "do_sample": True},
            "num_return_sequences=2 is not allowed: a chat writes one answer",
        ),
        ({"step": "fast"}, "step='fast'"),
    ],
    ids=str,
)
def test_options_that_generate_would_refuse(model, tmp_path, options, message):
    """When the chat is made, and when it is loaded."""
    with pytest.raises(ValueError, match=message):
        lb.Chat(model, tokenizer_of(), **options)
    chat = _chat(model)
    chat.send(words(5, 1))
    chat.save(tmp_path)
    with pytest.raises(ValueError, match=message):
        lb.Chat.load(tmp_path, model, tokenizer_of(), **options)


def test_messages_that_the_template_does_not_take(model):
    chat = _chat(model, "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}")
    chat.messages = [{"role": "user"}]
    with pytest.raises(ValueError, match=r"does not take chat\.messages: UndefinedError"):
        chat.send("w2")
    chat.messages = []
    assert chat.send("w2")


def test_a_model_whose_weights_are_all_offloaded(model):
    """Tokens stay on the CPU; hooks bring weights there."""
    offloaded = copy.deepcopy(model)
    cpu_offload(offloaded, execution_device="cpu")
    assert offloaded.device.type == "meta"
    texts = [words(20, 1), words(9, 2)]
    chats = [_chat(each) for each in (model, offloaded)]
    answers = [[chat.send(text) for text in texts] for chat in chats]
    assert answers[0] == answers[1]
