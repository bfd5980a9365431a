"""Answers a file of prompts on all GPUs of a Ray cluster: docs/several-machines.md."""

import sys

import pyarrow
import ray
import torch
from ray.data import ActorPoolStrategy, DataContext
from ray.data.checkpoint import CheckpointConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_lowbit_kv as lb

ROWS = 256  # prompts of a block


class Answer:
    def __init__(self, name):
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu")

    def __call__(self, block):
        options = {"tokenizer": self.tokenizer, "max_new_tokens": 200, "progress": False}
        results = lb.generate_many(self.model, block["prompt"].to_pylist(), "kivi-4-sink", **options)
        answers = {"answer": [result.text for result in results], "error": [result.error or "" for result in results]}
        return pyarrow.table({"id": block["id"], **answers})


name, prompts, answers = sys.argv[1:]
ray.init()
DataContext.get_current().checkpoint_config = CheckpointConfig(
    id_column="id", checkpoint_path=f"{answers}.ids", delete_checkpoint_on_success=False
)
actors = ActorPoolStrategy(size=int(ray.cluster_resources()["GPU"]))
rows = ray.data.read_json(prompts).sort("prompt").repartition(target_num_rows_per_block=ROWS)
rows = rows.map_batches(
    Answer, fn_constructor_args=[name], batch_size=ROWS, batch_format="pyarrow", num_gpus=1, compute=actors
)
rows.write_parquet(answers)
