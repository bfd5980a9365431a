"""What of transformers is overridden, on which object, and for how long; what is slower where transformers has other names."""

import copy
import pickle
from pathlib import Path
from types import MethodType

import pytest
import torch
from cases import left_padded, tiny_models
from generation_cases import GREEDY, ours
from processes import printed_in_forks
from transformers import DynamicCache, GenerationConfig

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import NAME, as_argument
from hf_lowbit_kv.generation import decoding_loop
from hf_lowbit_kv.generation.overriding import original, overridden

pytestmark = pytest.mark.host

STEPPING = ("_valid_auto_compile_criteria", "get_compiled_call")
ENABLING = ("generate", "_prepare_cache_for_generation")
SUPPORT = str(Path(__file__).parents[1] / "support")

IMPORT = """
import sys, types
import torch, transformers
from transformers import AttentionInterface, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.generation import utils
from transformers import cache_utils, masking_utils, modeling_utils
import transformers.integrations.sdpa_attention
from transformers.models.llama import modeling_llama

def own():  # everything that transformers' modules and classes have of their own
    seen = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "transformers":
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType) or key.startswith("__"):
                continue
            seen[name, key] = id(value)
            if isinstance(value, type) and value.__module__.split(".")[0] == "transformers":
                for each, held in list(vars(value).items()):
                    if not each.startswith("__") and not each.startswith("_abc_"):
                        seen[name, key, each] = id(held)
    return seen

attentions = set(AttentionInterface._global_mapping)
masks = set(masking_utils.AttentionMaskInterface._global_mapping)
operations = set(torch._C._dispatch_get_all_op_names())
before = own()
import hf_lowbit_kv
for name in dir(hf_lowbit_kv):  # public names are imported when they are first used
    getattr(hf_lowbit_kv, name)
after = own()
changed = [key for key in before if after.get(key) != before[key]]
assert not changed, changed
new = {key for key in after if key not in before and key[0] in {known[0] for known in before}}
new = {key for key in new if not hasattr(type(sys.modules[key[0]]), "_class_to_module")}  # names that are loaded on access
assert not {key for key in new if len(key) == 3 and key[:2] in before}, new
assert set(AttentionInterface._global_mapping) - attentions == {"lowbit_kv"}
assert set(masking_utils.AttentionMaskInterface._global_mapping) - masks == {"lowbit_kv"}
added = set(torch._C._dispatch_get_all_op_names()) - operations
assert {name for name in added if name.startswith("hf_lowbit_kv::")}
"""

RENAMED = """
import types, warnings
import torch, transformers
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import utils

def rename(owner, name):  # as a release of transformers would, wherever it uses the name
    setattr(owner, "another" + name, vars(owner)[name])
    delattr(owner, name)
    for function in [x for x in vars(GenerationMixin).values() if isinstance(x, types.FunctionType)]:
        for inner in (function, getattr(function, "__wrapped__", function)):
            code = inner.__code__
            names = tuple("another" + x if x == name else x for x in code.co_names)
            inner.__code__ = code.replace(co_names=names)

rename(GenerationMixin, "_valid_auto_compile_criteria")
rename(PreTrainedModel, "get_compiled_call")
rename(utils, "DeferredStopCheck")

import sys
sys.path.insert(0, SUPPORT)
from cases import tiny_models
import hf_lowbit_kv as lb
from hf_lowbit_kv.generation import decoding_loop as stepping, recording
from hf_lowbit_kv.cache.cache_argument import as_argument

model = tiny_models("llama")[0]
ids = torch.arange(1, 40)[None]
options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
want = model.generate(ids, **as_argument(lb.from_preset("kivi-2", model)), **options)
recording.graphs_for = lambda device: lambda: None
for call in (lb.generate, lb.generate):
    with warnings.catch_warnings(record=True) as shown:
        assert torch.equal(call(model, ids, "kivi-2", **options), want)
    print("told", *(str(each.message) for each in shown if "transformers" in str(each.message)))
with lb.enable(model, "kivi-2"):
    assert torch.equal(model.generate(ids, **options), want)
print("lacks", sorted(stepping.lacking()))
print("doctor", str(lb.doctor("cpu")))
"""


@pytest.fixture(scope="module")
def printed():
    """What `IMPORT` and `RENAMED` print in processes of their own, which have not imported the package before."""
    return printed_in_forks(
        "import torch, transformers.modeling_utils", IMPORT, RENAMED.replace("SUPPORT", repr(SUPPORT))
    )


@pytest.mark.newest
def test_importing_changes_nothing_of_transformers(printed):
    assert printed[0] == "done\n"


@pytest.mark.newest  # what is done then does not depend on the version
def test_names_that_transformers_lacks_make_steps_slower_and_say_so(printed):
    *lines, done = printed[1].splitlines()
    assert done == "done", printed[1]
    first, second, lacks, *rest = lines
    assert "no recorded steps: transformers" in first
    assert "has no GenerationMixin._valid_auto_compile_criteria. Decoding gives the same tokens, and is slower" in first
    assert second == "told"  # once
    assert lacks == "lacks ['recorded steps', 'steps that do not wait']"
    report = " ".join(rest)
    assert "has no GenerationMixin._valid_auto_compile_criteria (for recorded steps)" in report
    assert "has no DeferredStopCheck.is_supported" in report
    assert "(for steps that do not wait)" in report


def overrides(model):
    return {name for name in (*STEPPING, *ENABLING) if name in vars(model)}


@pytest.fixture
def models():
    models = tiny_models("llama")[0], tiny_models("llama")[0]
    yield models
    for model in models:
        lb.release(model)


@pytest.mark.usefixtures("graphs")
def test_only_the_model_that_decodes_is_overridden_and_only_then(models):
    model, other = models
    classes = [{name: getattr(type(model), name) for name in (*STEPPING, *ENABLING)}]
    attributes = set(vars(model))
    seen = []

    def watch(ids, scores):
        seen.append((overrides(model), overrides(other)))
        return scores

    ours(model, *left_padded(2, 40), new_tokens=4, logits_processor=[watch])
    assert seen == [(set(STEPPING), set())] * 4
    with pytest.raises(KeyError):
        ours(model, *left_padded(2, 40), new_tokens=4, logits_processor=[lambda *_: {}["missing"]])
    assert set(vars(model)) == attributes
    seen.clear()
    with lb.enable(model, "kivi-2"):
        assert overrides(model) == set(ENABLING)
        model.generate(left_padded(1, 40)[0], max_new_tokens=4, logits_processor=[watch], **GREEDY)
        assert overrides(model) == set(ENABLING)
    assert seen == [({*STEPPING, *ENABLING}, set())] * 4
    assert set(vars(model)) == attributes
    classes.append({name: getattr(type(model), name) for name in (*STEPPING, *ENABLING)})
    assert classes[0] == classes[1]


def test_other_caches_ask_the_original(models, graphs):
    """Inside a recorded call the same model decodes with a cache of its own."""
    model = models[0]
    ids, mask = left_padded(2, 40)
    want = ours(model, ids, mask, step="eager")
    other = model.generate(ids, attention_mask=mask, max_new_tokens=5, **as_argument(DynamicCache()), **GREEDY)
    answers = []

    def inside(inputs, scores):
        cache = DynamicCache()
        answers.append(model._valid_auto_compile_criteria(as_argument(cache), GenerationConfig()))
        got = model.generate(ids, attention_mask=mask, max_new_tokens=5, **as_argument(cache), **GREEDY)
        assert torch.equal(got, other)
        return scores

    assert torch.equal(ours(model, ids, mask, logits_processor=[inside]), want)
    assert answers == [False] * 12
    assert [graph.replays for graph in graphs] == [10]


def compiled_for_another(self, config):
    return lambda **inputs: ("theirs", config, sorted(inputs))


def test_the_callable_depends_on_the_cache_it_is_called_with(models, monkeypatch):
    model = models[0]
    monkeypatch.setattr(type(model), "get_compiled_call", compiled_for_another)
    cache, other = (lb.from_preset("kivi-2", model, max_cache_len=64) for _ in range(2))
    with decoding_loop.decoding_with(model, cache, lambda model, **inputs: ("ours", model)):
        assert model._valid_auto_compile_criteria(as_argument(cache), GenerationConfig()) is True
        assert model._valid_auto_compile_criteria(as_argument(other), GenerationConfig()) is False
        call = model.get_compiled_call("config")
        assert call(**as_argument(cache)) == ("ours", model)
        assert call(**as_argument(other)) == ("theirs", "config", [NAME])
    assert model.get_compiled_call("config")() == ("theirs", "config", [])


def test_generate_and_enable_share_recordings(models, graphs):
    model = models[0]
    ids, mask = left_padded(2, 100)
    options = {"attention_mask": mask, "max_new_tokens": 12, **GREEDY}
    plain = {"fuse": False}  # a fused step would warm up again
    want = lb.generate(model, ids, "kivi-2", step="eager", **options)
    assert torch.equal(lb.generate(model, ids, "kivi-2", **plain, **options), want)
    with lb.enable(model, "kivi-2", **plain):
        assert torch.equal(model.generate(ids, **options), want)
        assert torch.equal(lb.generate(model, ids, "kivi-2", **plain, **options), want)
    assert torch.equal(lb.generate(model, ids, "kivi-2", **plain, **options), want)
    assert [graph.replays for graph in graphs] == [10 + 3 * 11]


@pytest.mark.usefixtures("graphs")
def test_a_cache_of_an_enabled_call_goes_on_after_disable(models):
    model = models[0]
    ids, mask = left_padded(2, 100)
    options = {"max_new_tokens": 8, "return_dict_in_generate": True, **GREEDY}
    turns = []
    for cache in (lb.from_preset("kivi-2", model, max_cache_len=300), None):
        lb.enable(model, "kivi-2")
        first = model.generate(ids, attention_mask=mask, **options, **as_argument(cache))
        lb.disable(model)
        more = torch.cat([first.sequences, ids[:, -5:]], 1)
        longer = torch.cat([mask, torch.ones(2, more.shape[1] - 100, dtype=mask.dtype)], 1)
        turns.append(model.generate(more, attention_mask=longer, **options, **as_argument(first[NAME])).sequences)
    assert torch.equal(*turns)


def test_a_pickled_model_is_not_enabled(models):
    model = models[0]
    lb.enable(model, "kivi-2")
    loaded = pickle.loads(pickle.dumps(model))
    lb.disable(model)
    options = {"max_new_tokens": 4, "return_dict_in_generate": True, **GREEDY}
    ids = left_padded(1, 40)[0]
    assert type(loaded.generate(ids, **options)[NAME]) is DynamicCache
    with pytest.raises(ValueError, match="is not enabled"):
        lb.disable(loaded)
    with lb.enable(loaded, "kivi-2"):
        assert loaded.generate(ids, **options)[NAME].preset == "kivi-2"
    assert type(loaded.generate(ids, **options)[NAME]) is DynamicCache


class Thing:
    def name(self):
        return "class"


def name(self):
    return f"override of {original(self, 'name')()}"


def test_overrides_are_counted_and_give_back_what_was_there():
    thing, other = Thing(), Thing()
    with overridden(thing, name):
        with overridden(thing, name):
            assert thing.name() == "override of class"
        assert (thing.name(), other.name()) == ("override of class", "class")
    assert vars(thing) == {}
    thing.name = own = MethodType(lambda self: "its own", thing)
    with overridden(thing, name):
        assert thing.name() == "override of its own"
    assert vars(thing) == {"name": own}


def test_what_somebody_else_puts_in_the_place_stays():
    thing = Thing()
    with overridden(thing, name):
        thing.name = other = lambda: "another"
    assert vars(thing) == {"name": other}


def test_copies_and_pickles_of_what_is_overridden():
    thing = Thing()
    with overridden(thing, name):
        copied, loaded = copy.deepcopy(thing), pickle.loads(pickle.dumps(thing))
    assert thing.name() == "class"
    assert copied.name() == "override of class"
    assert copied.name.__self__ is copied
    assert loaded.name() == "class"
