"""What the tests of `lb.generate` share, on the CPU and on a GPU."""

import torch
from cases import SMALL_PAGES, left_padded
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hf_lowbit_kv as lb

GREEDY = {"do_sample": False, "pad_token_id": 0}
#: rounding to fp16 in two layers, seen 1e-3 to 6e-3; a token or a mask that is wrong gives 0.1 and more
TOLERANCE = 2e-2
#: families whose steps are recorded; docs/dev/recording.md has the table
RECORDED = (
    *(
        "llama",
        "qwen3",
        "qwen3_moe",
        "mixtral",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "gpt_oss",
        "mimo_v2_flash",
        "phi3",
    ),
    *("qwen3_next", "lfm2"),
)

#: family -> pieces of a step that are fused in 16 bits, and of how many: norms, rotary, gate, products
FUSED = {
    "llama": "norms 5/5, rotary 2/2, gate 2/2, products 4/4",
    "qwen2": "norms 5/5, rotary 2/2, gate 2/2, products 4/4",
    "qwen3": "norms 9/9, rotary 2/2, gate 2/2, products 4/4",
    "phi3": "norms 5/5, rotary 2/2, gate 2/2",
    "gemma2": "norms 9/9, rotary 2/2, gate 2/2, products 4/4",
    "gemma3_text": "norms 13/13, rotary 2/2, gate 2/2, products 4/4",
    "gpt_oss": "norms 5/5, rotary 2/2, products 2/2",
    "gemma4_text": "norms 34/34, gate 5/5, products 6/6",
    "mimo_v2_flash": "norms 5/5, rotary 2/2, gate 1/1, products 3/3",
    "glm4": "gate 2/2, products 2/2",
    "cohere": "gate 2/2, products 4/4",
    "olmo2": "norms 9/9, rotary 2/2, gate 2/2, products 4/4",
    "qwen3_moe": "norms 9/9, rotary 2/2, products 2/2",
    "deepseek_v3": "gate 2/2, products 4/4",
    "qwen3_next": "norms 7/7, rotary 1/1, gate 2/2, products 3/3",
}


class StopAt(StoppingCriteria):
    """All rows stop once they are so long."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length, device=input_ids.device)


class Collect(BaseStreamer):
    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces.append(value.reshape(-1))

    def end(self):
        self.ended = True


class Watch(LogitsProcessor):
    """From its third call on, whatever waits for the device raises."""

    def __init__(self, first=3):
        self.calls, self.first = 0, first

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == self.first:
            torch.cuda.set_sync_debug_mode("error")
        return scores


class StopWatching(StoppingCriteria):
    """Allows waiting again before the last step: the end of `generate` reads back what was written."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= self.length:
            torch.cuda.set_sync_debug_mode("default")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Forced(LogitsProcessor):
    """Makes `generate` choose the tokens of `sequences`."""

    def __init__(self, sequences):
        self.sequences = sequences

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -torch.inf).scatter_(1, self.sequences[:, input_ids.shape[1], None], 0.0)


def close(found, expected) -> None:
    """Logits in fp16, up to its rounding."""
    assert torch.isfinite(found).all()
    error = (found - expected).float().abs().max() / expected.float().abs().max()
    assert error < TOLERANCE, float(error)


def graph_launches(call) -> int:
    with torch.profiler.profile() as profiler:
        call()
    return [event.name() for event in profiler.profiler.kineto_results.events()].count("cudaGraphLaunch")


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.7},
    "return_sequences": {"do_sample": True, "num_return_sequences": 2},
    "chunked_prefill": {"prefill_chunk_size": 40},
    "logits_processor": {"logits_processor": [RepetitionPenaltyLogitsProcessor(3.0)], "no_repeat_ngram_size": 2},
    "stopping_criteria": {"stopping_criteria": [StopAt(105)]},
    "eos": {"eos_token_id": list(range(0, 160, 2))},
}


def ours(model, ids, mask, preset="kivi-2-sink", new_tokens=12, **options):
    torch.manual_seed(1)
    inputs = {"input_ids": ids, "attention_mask": mask}
    # without fused pieces recorded steps give the eager bits
    options = GREEDY | {"cache_options": SMALL_PAGES, "progress": False, "fuse": False} | options
    return lb.generate(model, inputs, preset, new_tokens, **options)


def eager(model, *args, **options):
    return ours(model, *args, step="eager", **options)


def growing(model, ids, mask, preset="kivi-2-sink", new_tokens=12, **options):
    """`model.generate` with a growing cache, eagerly."""
    torch.manual_seed(1)
    cache = lb.from_preset(preset, model, **SMALL_PAGES)
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=new_tokens, **GREEDY | options
    )


def turns(generate):
    """Two turns of three rows: `generate(ids, mask, cache)` with and without cache. The second has padding in the middle, and
    hides the end of the first answer of row 1."""
    (ids, mask), (more_ids, more_mask) = left_padded(3, 90), left_padded(3, 50, seed=1)
    first = generate(ids, mask, None)
    written = first.sequences.cpu()
    ids = torch.cat([written, more_ids], dim=1)
    answer = torch.ones_like(written[:, mask.shape[1] :])
    answer[1, -5:] = 0
    mask = torch.cat([mask, answer, more_mask], dim=1)
    return written, generate(ids, mask, first.past_key_values).sequences.cpu()


def turns_after_a_stop(model, step):
    """`turns` on a GPU, whose rows end early."""

    def generate(ids, mask, cache):
        kind = {"past_key_values": cache} if cache else {"preset": "kivi-2", "max_cache_len": 512}
        options = {"return_dict_in_generate": True, "step": step, "eos_token_id": [7, 14, 21], **GREEDY}
        inputs = {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}
        return lb.generate(model, inputs, max_new_tokens=80, progress=False, fuse=False, **kind, **options)

    return turns(generate)
