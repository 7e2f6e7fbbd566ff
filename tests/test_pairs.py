"""Tests of training on pairs: only responses count, whatever the chunks, schedulers and micro-batches."""

import json
import math

import numpy as np
import pytest
from small_runs import MODEL, config_of, losses_of, metrics_of, same, stopping_at

import daskgpt
from daskgpt import generate, train
from daskgpt.config.run import OptimizerConfig
from daskgpt.data.dataset import batch, load_dataset, validation_batches
from daskgpt.generation.sanitize import sanitized

END = 256
# Of several lengths; the last two are longer than a sequence of 16 tokens and its end, one already by its prompt.
PAIRS = [(f"{number}+1=", str(number + 1)) for number in range(38)] + [("a" * 9, "b" * 9), ("c" * 17, "d")]
SHAPE = {"batch_size": 4, "sequence_length": 16}
DROPPING = OptimizerConfig(dropout=0.2, warmup=3)


def write(path, pairs=PAIRS):
    path.write_text("".join(json.dumps({"prompt": one, "response": other}) + "\n" for one, other in pairs))
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


def fit(pairs, out, *, data=None, optimizer=DROPPING, dataflow=None, on_step=None, **run):
    data = SHAPE | {"data": str(pairs), "groups": 4} | (data or {})
    settings = {"steps": 6, "validation_batches": 2, "validate_every": 4, "save_minutes": 0, "out": str(out)} | run
    return daskgpt.fit(MODEL, data, optimizer, dataflow, settings, on_step=on_step, quiet=True)


def test_examples_and_their_counted_targets(pairs):
    dataset = load_dataset(str(pairs), sequence_length=16)
    assert "35 pairs and 4 pairs held out; 1 cut to 17 tokens; 1 left out" in dataset.description
    seen = {}
    for step in range(9):  # an epoch, and a sequence of the next one
        tokens, targets, weights = batch(dataset.training, **SHAPE, seed=3, step=step, order=dataset.order)
        assert weights.mean() == pytest.approx(1)
        for row, following, weight in zip(tokens, targets, weights):
            assert row[1:].tolist() == following[:-1].tolist()
            text, response = (
                bytes(row[row != END].tolist()),
                bytes(following[(weight > 0) & (following != END)].tolist()),
            )
            ends = (following[weight > 0] == END).sum()
            seen[text.decode()] = response.decode(), int(ends)
    held = [bytes(dataset.validation.prompt(number)).decode() for number in range(4)]
    assert bytes(dataset.prompt).decode() == held[0]
    trained = [(one, other) for one, other in PAIRS[:-1] if one not in held]
    cut = {"aaaaaaaaabbbbbbb": ("bbbbbbbb", 0)}
    assert seen == {one + other: (other, 1) for one, other in trained if one[0] != "a"} | cut


def test_validation_counts_every_held_out_target_once(pairs):
    tokens = load_dataset(str(pairs), validation_fraction=0.15, sequence_length=16).validation
    assert tokens.count == 6
    for size, most, count, examples in ((4, 9, 2, 6), (6, 1, 1, 6), (2, 2, 2, 4)):
        batches = list(validation_batches(tokens, batch_size=size, sequence_length=16, count=most))
        weights = np.concatenate([weights for _, _, weights in batches])
        assert (len(batches), int((weights.max(-1) > 0).sum())) == (count, examples)
        assert weights.mean() == pytest.approx(1)
        assert len(set(weights[weights > 0])) == 1


@pytest.fixture(scope="module")
def whole(pairs, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    fit(pairs, out, dataflow={"scheduler": "sync", "batch_chunk": 4, "sequence_chunk": 16})
    return out


def test_chunks_micro_batches_and_resuming_change_no_bit(pairs, whole, tmp_path):
    dials = {"scheduler": "threads", "threads": 2, "batch_chunk": 1, "sequence_chunk": 4}
    fit(pairs, tmp_path / "chunks", dataflow=dials | {"barrier": "none"})
    fit(pairs, tmp_path / "micro", data={"batch_size": 2, "accumulate": 2}, dataflow=dials)
    fit(pairs, tmp_path / "stopped", on_step=stopping_at(3))
    daskgpt.fit(resume=tmp_path / "stopped", dataflow=dials, quiet=True)
    assert all(same(tmp_path / name, whole) for name in ("chunks", "micro", "stopped"))
    losses = [
        [r["validation_loss"] for r in metrics_of(folder) if "validation_loss" in r] for folder in tmp_path.iterdir()
    ]
    assert losses == [losses[0]] * 3
    assert len(losses[0]) == 2


def test_two_workers_give_the_bits_of_one_process(cluster, pairs, whole, tmp_path):
    cluster.have(2)
    fit(pairs, tmp_path / "run", dataflow={"scheduler": cluster.address})
    assert same(tmp_path / "run", whole)


def test_chunks_change_no_bit_in_bfloat16(pairs, tmp_path):
    for number, dials in enumerate(({"batch_chunk": 4}, {"batch_chunk": 2, "sequence_chunk": 8, "threads": 2})):
        fit(pairs, tmp_path / str(number), dataflow=dials | {"precision": "bfloat16"}, steps=3)
    assert same(tmp_path / "0", tmp_path / "1")


def test_fine_tuning_from_the_command_line(pairs, whole, tmp_path, capsys):
    """The recipe's length is in epochs; a length, as any other flag, takes the place of the recipe's. Its sequences
    are no longer than the model's positions.
    """
    flags = f"--preset finetune --data {pairs} --learning-rate 0.003 --sample-tokens 8".split()
    with pytest.raises(ValueError, match="must have a model to start from; got preset=finetune"):
        train.main(flags)
    out = tmp_path / "tuned"
    flags += ["--init", str(whole)]
    assert train.main([*flags, "--plan"]) == 0
    assert "memory" in capsys.readouterr().out
    assert train.main([*flags, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    settings, losses = config_of(out), losses_of(out)
    assert settings["data"]["sequence_length"] == MODEL.positions == 16
    with pytest.raises(ValueError, match="must not be longer than the model's positions; got sequence_length=17"):
        train.main([*flags, "--sequence-length", "17", "--out", str(tmp_path / "long")])
    assert (settings["run"]["epochs"], settings["run"]["steps"]) == (3, math.ceil(3 * 35 / 8))
    assert (settings["optimizer"]["clip"], settings["data"]["batch_size"]) == (1, 8)
    assert losses[-1] < losses[0] - 0.5
    samples = [line for line in said.splitlines() if line.startswith("--- sample after")]
    assert [line.split()[3] for line in samples] == ["0", "14"]
    prompt = bytes(load_dataset(str(pairs), sequence_length=16).prompt).decode()
    assert said.count(f"\n{prompt}") == 2
    assert train.main([*flags, "--steps", "2", "--out", str(tmp_path / "short")]) == 0
    assert len(losses_of(tmp_path / "short")) == 2


def test_chat_gives_lines_the_form_of_the_template(pairs, whole, called):
    """Each is a text of its own then; so is --prompt."""
    config, parameters = daskgpt.load(whole)

    def answer(prompt):
        tokens = daskgpt.sample(config, parameters, list(prompt.encode()), 6, temperature=0, end=END)
        return bytes(token for token in tokens if token != END)

    def told(typed, *flags):
        return called(generate, whole, "--tokens", 6, "--temperature", 0, *flags, typed=typed)[1]

    form = r"<{}>\n"
    first, second = ("".join(sanitized([answer(f"<{line}>\n"), b"\n"])) for line in "xy")
    assert told("x\ny\n", "-i", "--template", form) == first + second + "\n"
    assert told("", "--template", form, "--prompt", "x") == "<x>\n" + first
    assert told("", "--prompt", "x") == "x" + "".join(sanitized([answer("x"), b"\n"]))
    with pytest.raises(ValueError, match="must have one {}"):
        told("", "--template", "Q: A:")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "a", "response": ', "JSON in UTF-8.*line 42.*JSONDecodeError"),
        (b'{"prompt": "a", "text": "b"}', '"prompt" and "response".*line 42.*KeyError'),
        (b'{"prompt": "\xff", "response": "b"}', "not UTF-8"),
    ],
)
def test_wrong_lines_are_refused_by_number(tmp_path, line, said):
    path, out = write(tmp_path / "pairs.jsonl"), tmp_path / "run"
    path.write_bytes(b"\n" + path.read_bytes() + line + b"\n")
    with pytest.raises(ValueError, match=said):
        train.main(["--data", str(path), "--out", str(out)])
    assert not out.exists()


def test_a_few_short_pairs_suffice(tmp_path):
    dataset = load_dataset(str(write(tmp_path / "pairs.jsonl", PAIRS[:8])), sequence_length=64)
    assert (dataset.training.count, dataset.validation.count) == (7, 1)
    assert dataset.validation.size < 64


def test_too_few_pairs_are_refused(tmp_path):
    for pairs, said in (
        (PAIRS[:3], "pairs=3, too long=0"),
        ([PAIRS[-1]] * 9, "pairs=9, too long=9"),
        ([], "must not be empty"),
    ):
        with pytest.raises(ValueError, match=said):
            load_dataset(str(write(tmp_path / "pairs.jsonl", pairs)), sequence_length=16)
