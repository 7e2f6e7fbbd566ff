"""Tests of an exported folder in lm-evaluation-harness's own `hf` model beside `daskgpt.evaluate`.

Skipped where the harness and PyTorch are not installed (the extra `test-peers`).
"""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from conftest import SMALL, random_parameters
from test_tokenizers import trained
from tolerances import TOLERANCES

import daskgpt
from daskgpt import convert, evaluate

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
pytest.importorskip("torch", reason="PyTorch is not installed (the extra test-peers)")
lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (the extra test-peers)")

WORDS = [*("the", "quick", "brown", "fox", "jumps", "over"), *("lazy", "dogs", "while", "wizards", "box", "foam")]
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}


def sentence(draw, words):
    return " ".join(draw.choice(WORDS, words))


@pytest.fixture
def folder(tmp_path):
    """A random model with a learned tokenizer, in Hugging Face's layout."""
    config = replace(SMALL, vocabulary=320, padded_vocabulary=0, positions=64)
    parameters = random_parameters(config, np.random.default_rng(4))
    daskgpt.save(tmp_path / "own.safetensors", config, parameters)
    assert convert.main([str(tmp_path / "own.safetensors"), str(tmp_path / "folder")]) == 0
    trained().save(str(tmp_path / "folder" / "tokenizer.json"))
    stored = tmp_path / "folder" / "tokenizer_config.json"
    stored.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}))
    assert convert.main([str(tmp_path / "folder"), str(tmp_path / "exported")]) == 0
    return tmp_path / "exported"


@pytest.fixture
def evaluated(folder, tmp_path, capsys):
    """What the harness says of a file of documents, and `daskgpt.evaluate` of the file that it reads."""

    def run(documents, data):
        settings = {"task": "local", "dataset_path": "json", "test_split": "test"}
        settings["dataset_kwargs"] = {"data_files": {"test": str(documents)}}
        (tmp_path / "tasks").mkdir()
        (tmp_path / "tasks" / "local.yaml").write_text(json.dumps(settings | ROLLING))  # YAML includes JSON
        theirs = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "float32"},
            tasks=["local"],
            task_manager=lm_eval.tasks.TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
            device="cpu",
            bootstrap_iters=0,
        )
        capsys.readouterr()
        assert evaluate.main([str(folder), "--data", str(data), "--json"]) == 0
        return theirs["results"]["local"], json.loads(capsys.readouterr().out)

    return run


def test_bits_a_byte_of_a_text(evaluated, tmp_path):
    """The harness gives the last sequence of a text more context unless it is a whole one."""
    text, documents, tokenizer = tmp_path / "text.txt", tmp_path / "text.jsonl", trained()
    words = sentence(np.random.default_rng(2), 400)
    while len(tokenizer.encode(words).ids) % 64:
        words = words[:-1]
    text.write_text(words)
    documents.write_text(json.dumps({"text": words}) + "\n")
    theirs, ours = evaluated(documents, text)
    assert ours["tokens"] == len(tokenizer.encode(words).ids)
    assert theirs["bits_per_byte,none"] == pytest.approx(
        ours["bits_a_byte"], **TOLERANCES["another program's evaluation"]
    )
