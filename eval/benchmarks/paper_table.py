"""The table of docs/protocols.md: figures from papers, and this project's figures by the same protocol, if measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from hf_lowbit_kv.eval.benchmarks.result_files import current_records, markdown_table
from hf_lowbit_kv.eval.provenance import RESULTS

#: rows of `hf-lowbit-kv eval protocol --json`, with `model`, `commit` and `date`
RECORDS = RESULTS / "protocols.jsonl"
WIKITEXT = "WikiText-2 perplexity"


class Published(NamedTuple):
    """A figure as its source prints it. full: figure of the 16-bit cache in the same row. It is empty if the source
    compares with something else; then `remark` names it."""

    method: str
    bits: str
    model: str
    measure: str
    full: str
    figure: str
    source: str
    remark: str = ""


def _arxiv(number: str) -> str:
    return f"[arXiv {number}](https://arxiv.org/abs/{number})"


_WUSH, _OSCAR = _arxiv("2609.38121"), _arxiv("2605.17757")
PUBLISHED = (
    Published("WUSH-KV", "2 + scales", "Qwen/Qwen3-8B", WIKITEXT, "9.72", "10.51", _WUSH, "sink 16, newest 128"),
    Published("WUSH-KV", "3 + scales", "Qwen/Qwen3-8B", WIKITEXT, "9.72", "9.82", _WUSH, "sink 16, newest 128"),
    Published("WUSH-KV", "4 + scales", "Qwen/Qwen3-8B", WIKITEXT, "9.72", "9.73", _WUSH, "sink 16, newest 128"),
    Published("OSCAR", "2 + scales", "Qwen/Qwen3-8B", WIKITEXT, "9.72", "13.74", _WUSH, "measured by WUSH-KV"),
    Published("random rotation", "2 + scales", "Qwen/Qwen3-8B", WIKITEXT, "9.72", "14.22", _WUSH, "measured by WUSH-KV"),
    Published("Hadamard", "2 + scales", "Qwen/Qwen3-8B", WIKITEXT, "9.72", "258", _WUSH, "measured by WUSH-KV"),
    Published("OSCAR", "2.28", "Qwen/Qwen3-8B", "mean of 5 reasoning tasks", "70.84", "69.42", _OSCAR),
    Published("OSCAR", "2.28", "Qwen/Qwen3-4B", "mean of 5 reasoning tasks", "75.64", "71.86", _OSCAR),
    Published("KIVI", "2.25", "Qwen/Qwen3-8B", "AIME25", "66.0", "52.3", "OSCAR's README"),
    Published("Kitty", "2.39", "Qwen/Qwen3-8B", "AIME25", "66.0", "59.7", "OSCAR's README"),
    Published("OSCAR", "2.38", "Qwen/Qwen3-8B", "AIME25", "66.0", "66.7", "OSCAR's README"),
    Published("KVarN", "keys 4, values 2", "Qwen/Qwen3-4B", "AIME24", "61.1", "60.0", _arxiv("2606.03458")),
    Published("OScaR", "2, groups of 32", "meta-llama/Llama-3.1-8B", "LongBench-E", "41.70", "41.75", _arxiv("2605.19660")),
    Published("CommVQ", "2", "an 8B Llama", "LongBench", "48.05", "47.98", _arxiv("2506.18879"), "trained"),
    Published("CommVQ", "1", "an 8B Llama", "LongBench", "48.05", "44.94", _arxiv("2506.18879"), "trained"),
    Published("AQUA-KV", "2.09", "meta-llama/Llama-3.1-8B", "perplexity", "", "6.14", _arxiv("2501.19392"), "HIGGS: 7.55"),
)  # fmt: skip


def paper_table(path: Path = RECORDS) -> str:
    """The published figures. Those of the protocol `wikitext` are shown with ours."""
    records = current_records(path)
    head = ["method", "bits", "model", "measure", "16 bits", "theirs", "source", "remark", "ours"]
    body = (
        [
            row.method,
            row.bits,
            row.model.split("/")[-1],
            row.measure,
            row.full,
            row.figure,
            row.source,
            row.remark,
            _ours(row, records),
        ]
        for row in PUBLISHED
    )
    return markdown_table(head, body)


def _ours(row: Published, records: list[dict[str, Any]]) -> str:
    """Our figure on the same model by the same protocol; empty if there is no record."""
    if row.measure != WIKITEXT:
        return ""
    same = [
        record
        for record in records
        if (record["model"], record["protocol"], record["residual"]) == (row.model, "wikitext", 128)
        and "wikitext" in record["text"]
    ]
    return ", ".join(f"`{record['preset']}` {record['ppl']:.2f} (16 bits {record['ppl_full']:.2f})" for record in same)
