"""Tests of GGUF files in llama.cpp: it reads the tokenizer, scores and writes as this program does.

Skipped where llama-cpp-python is not installed.
"""

import argparse
import inspect
from itertools import islice

import numpy as np
import pytest
from batch_results import results_of
from small_runs import FLAGS

import daskgpt
from daskgpt import convert, train
from daskgpt.formats.encoding import get_encoding
from daskgpt.training.checkpoint import open_model_of

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
TEXT = inspect.getsource(argparse)
TEXTS, LENGTH = 40, 250


LLAMA = "--position rotary --norm rmsnorm --norm-eps 1e-6 --activation swiglu --bias none --kv-heads 2 --hidden 160"


@pytest.mark.parametrize(
    ("encoding", "choices"), [("bytes", ""), ("learn:600", ""), ("gpt2", ""), ("learn:600", LLAMA)]
)
def test_llama_cpp_scores_and_writes_the_same(encoding, choices, tmp_path):
    run, file = str(tmp_path / "run"), str(tmp_path / "model.gguf")
    flags = f"{choices} --encoding {encoding} --blocks 2 --channels 64 --positions 256 --steps 100".split()
    try:
        assert train.main([*FLAGS.split(), "--sequence-length", "128", *flags, "--out", run]) == 0
    except FileNotFoundError as error:  # GPT-2's vocabulary
        pytest.skip(str(error))
    assert convert.main([run, file]) == 0
    config, parameters = daskgpt.load(run)
    theirs = llama_cpp.Llama(file, n_ctx=256, type_k=0, type_v=0, logits_all=True, n_threads=1, verbose=False)
    ids = get_encoding(open_model_of(run).encoding).encode(TEXT + " naïve 日本語 \x00\t'll").tolist()
    assert theirs.tokenize((TEXT + " naïve 日本語 \x00\t'll").encode(), add_bos=False) == ids
    tokens = np.array(ids[: TEXTS * LENGTH], np.int32).reshape(TEXTS, LENGTH)
    with daskgpt.open_scheduler("threads", 2) as scheduler:
        logits = results_of(scheduler, config, parameters, (tokens,), (1, LENGTH))["logits"]
    ours = logits[..., : config.vocabulary].argmax(2)
    same = 0
    for text, likeliest in zip(tokens, ours, strict=True):
        theirs.reset()
        theirs.eval(text.tolist())
        same += int(np.sum(theirs.scores[:LENGTH].argmax(1) == likeliest))
    assert same >= 0.999 * tokens.size
    theirs.reset()
    written = theirs.generate(ids[:20], temp=0.0, repeat_penalty=1.0)
    assert list(islice(written, 200)) == list(daskgpt.sample(config, parameters, ids[:20], 200, temperature=0.0))
