"""Tables of docs/transformers-quantized-cache.md: transformers' own quantized caches beside presets, on each model that
has records of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_lowbit_kv.eval.benchmarks.front_page import MODELS, mean
from hf_lowbit_kv.eval.benchmarks.model_accuracy import PEERS
from hf_lowbit_kv.eval.benchmarks.peer_texts import FULL, OUT
from hf_lowbit_kv.eval.benchmarks.result_files import current_records, markdown_table

#: presets that are shown beside the peers
SHOWN = ("dense", "int8", "kivi-4-sink", "k4v2-sink")
#: what a peer stores beside its codes: a scale and a shift of 16 bits for 64 numbers
METADATA_BITS = 32 / 64
#: how a table names caches that are no presets
NAMES = {
    "quanto-4": "quanto, 4 bits",
    "quanto-4-channel": "quanto, 4 bits, `axis_key=-1`",
    "quanto-2": "quanto, 2 bits",
    "hqq-4": "HQQ, 4 bits",
    FULL: "`DynamicCache`",
}


def peers_table(path: Path = MODELS) -> str:
    """KL of both kinds, for each model at its longest measured context: means of the texts that all peers have read."""
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for record in current_records(path):
        if record["preset"] in (*SHOWN, *PEERS):
            caches = found.setdefault((record["model"], record["context"]), {})
            caches.setdefault(record["preset"], {})[record["text"]] = record
    longest = {model: context for model, context in sorted(found) if PEERS.keys() & found[model, context].keys()}
    rows = []
    for model, context in longest.items():
        caches = found[model, context]
        texts = set.intersection(*(set(caches[name]) for name in caches if name in PEERS))
        shown = f"{model.partition(',')[0]}, {len(texts)} text{'s' * (len(texts) > 1)} of {context} tokens"
        for name in sorted((name for name in caches if texts <= set(caches[name])), key=[*SHOWN, *PEERS].index):
            records = {text: caches[name][text] for text in texts}
            rows.append(
                [
                    shown,
                    NAMES.get(name, f"`{name}`"),
                    f"{_bits(name, records):.2f}",
                    f"{mean(records, 'kl'):.4f}",
                    f"{max(record['kl_p999'] for record in records.values()):.2f}",
                    f"{100 * mean(records, 'top1'):.1f} %",
                ]
            )
            shown = ""
    return markdown_table(("model", "cache", "bits", "KL", "99.9th", "same next token"), rows)


def _bits(name: str, records: dict[str, Any]) -> float:
    return PEERS[name][1] + METADATA_BITS if name in PEERS else mean(records, "bits_per_value")


def texts_table(path: Path = OUT) -> str:
    """The newest answers of each model and cache."""
    newest = {(record["model"], record["cache"]): record for record in current_records(path)}
    rows = []
    for (model, cache), record in newest.items():
        text = " ".join(record["text"].split()).replace("|", "\\|").replace("`", "'")
        size = f"{record['cache_bytes'] / 1e6:.1f}"
        rows.append([model.partition(",")[0], NAMES.get(cache, f"`{cache}`"), size, text])
    return markdown_table(("model", "cache", "MB", "answer"), rows).replace("---:|\n", "---|\n", 1)
