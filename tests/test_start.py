"""Tests of the start of a run: settings that --init takes from a run or a model file, and the encoding of a model."""

import shutil

import numpy as np
import pytest
from small_runs import config_of, losses_of

import daskgpt
from daskgpt import audit, bench, generate, prepare, rewind, study, train
from daskgpt.schedulers import connect

SHORT = "--batch-size 4 --steps 3 --validation-batches 1 --warmup 0 --learning-rate 1e-5 --sample-tokens 0"
GPT2 = "--preset gpt2 --blocks 1 --heads 2 --channels 8 --sequence-length 16"
NOWHERE = "GPT-2.s encoder.json must be at hand"


@pytest.fixture(scope="module")
def first(tmp_path_factory, small_text):
    """A run that was given a relative path, from another folder than those that follow."""
    out = tmp_path_factory.mktemp("run") / "first"
    flags = "--blocks 1 --heads 2 --channels 16 --sequence-length 32 --validation-fraction 0.2 --batch-size 4"
    flags += " --steps 40 --validation-batches 1 --warmup 5 --sample-tokens 0"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(small_text.parent)
        assert begin("--data", small_text.name, flags, "--out", out) == 0
    return out


def begin(*arguments):
    return train.main([word for argument in arguments for word in str(argument).split()])


def model_of(path, **numbers):
    """A model file that names no encoding, without a run around it."""
    config = daskgpt.preset("tiny", **{"blocks": 1, "heads": 2, "channels": 16, "positions": 32} | numbers)
    daskgpt.save(path, config, daskgpt.initial_parameters(config, seed=0))
    return path


@pytest.mark.parametrize("path", ["", "latest", "latest/model.safetensors"])
def test_init_takes_settings_from_the_first_run(first, tmp_path, path):
    out = tmp_path / "second"
    assert begin("--init", first / path, SHORT, "--out", out) == 0
    old, new = config_of(first), config_of(out)
    assert (new["model"], new["data"]) == (old["model"], old["data"])
    assert losses_of(out)[0] < np.mean(losses_of(first)[-3:]) + 0.3 < losses_of(first)[0]


def test_model_file_has_encoding_and_length(first, small_text, tmp_path):
    alone = shutil.copy(first / "latest" / "model.safetensors", tmp_path / "alone.safetensors")
    with pytest.raises(ValueError, match="encoding=gpt2, init="):
        begin("--init", alone, "--data", small_text, "--encoding gpt2 --out", tmp_path / "out")
    assert begin("--init", alone, "--data", small_text, SHORT, "--out", tmp_path / "second") == 0
    data = config_of(tmp_path / "second")["data"]
    assert (data["encoding"], data["sequence_length"]) == ("bytes", 32)
    assert losses_of(tmp_path / "second")[0] < losses_of(first)[0] - 0.3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--channels 128", r"channels=128, init=.*\(channels=16\)"),
        ("--preset tiny", "blocks=4, heads=4, channels=128"),
        ("--sequence-length 64", "sequence_length=64, positions=32"),
        ("--encoding gpt2", r"encoding=gpt2, init=.*\(bytes\)"),
    ],
)
def test_init_refuses_conflicting_flags(first, tmp_path, flags, said):
    with pytest.raises(ValueError, match=said):
        begin("--init", first, flags, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("prepared", "given", "order"),
    [(False, "auto", "random"), (False, "epochs", "epochs"), (True, "auto", "epochs"), (True, "random", "random")],
)
def test_order_of_sequences_is_that_of_the_data_unless_it_is_given(prepared, given, order, small_text, tmp_path):
    data = small_text
    if prepared:
        data = tmp_path / "tokens"
        assert prepare.main([str(small_text), "--encoding", "bytes", "--out", str(data)]) == 0
    flags = "--blocks 1 --heads 2 --channels 16 --sequence-length 16 --order", given
    assert begin(SHORT, *flags, "--data", data, "--out", tmp_path / "run") == 0
    assert config_of(tmp_path / "run")["data"]["order"] == order


def test_vocabulary_size_determines_the_encoding(small_text, tmp_path, monkeypatch):
    out = tmp_path / "out"
    model = model_of(tmp_path / "bytes.safetensors", vocabulary=300)
    assert begin("--init", model, "--data", small_text, SHORT, "--out", out) == 0
    assert (config_of(out)["data"]["encoding"], config_of(out)["data"]["sequence_length"]) == ("bytes", 32)
    monkeypatch.setenv("DASKGPT_VOCABULARY", str(tmp_path))
    for vocabulary, error, said in ((50304, FileNotFoundError, NOWHERE), (256, ValueError, "--encoding")):
        path = model_of(tmp_path / f"{vocabulary}.safetensors", vocabulary=vocabulary, channels=2)
        with pytest.raises(error, match=said):
            begin("--init", path, "--data", small_text, SHORT, "--out", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_init_without_a_readable_configuration(first, tmp_path):
    """The checkpoint has all of it."""
    copy = shutil.copytree(first, tmp_path / "copy")
    (copy / "config.toml").write_text("no toml")
    assert generate.main([str(copy), "--tokens", "2"]) == 0
    assert begin("--init", copy, "--sequence-length 16", SHORT, "--out", tmp_path / "second") == 0
    assert config_of(tmp_path / "second")["data"] == config_of(first)["data"] | {"sequence_length": 16}
    assert begin("--resume", copy, "--steps 41") == 0


def test_fit_checks_the_configuration_of_init(first, small_text):
    data = daskgpt.DataConfig(data=str(small_text), sequence_length=32, batch_size=4)
    settings = daskgpt.RunConfig(steps=1, validation_batches=1, init=str(first))
    config, parameters = daskgpt.load(first)
    assert daskgpt.fit(config, data, run=settings, quiet=True).losses[0] < losses_of(first)[0] - 0.3
    other = daskgpt.preset("tiny", blocks=2, heads=2, channels=16, positions=32)
    with pytest.raises(ValueError, match=r"fit: .*blocks=2, init=.* \(blocks=1\)"):
        daskgpt.fit(other, data, run=settings)
    with pytest.raises(ValueError, match="check_parameters: "):
        daskgpt.fit(other, data, run=daskgpt.RunConfig(steps=1), parameters=parameters)


def test_gpt2_preset_uses_gpt2_encoding(small_text, tmp_path, monkeypatch):
    monkeypatch.setenv("DASKGPT_VOCABULARY", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=NOWHERE):
        begin("--data", small_text, GPT2, "--out", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=NOWHERE):
        daskgpt.fit(daskgpt.preset("gpt2", blocks=1), daskgpt.DataConfig(data=str(small_text)))
    out = tmp_path / "bytes"
    assert begin("--data", small_text, GPT2, "--encoding bytes", SHORT, "--out", out) == 0
    assert (config_of(out)["model"]["vocabulary"], config_of(out)["data"]["encoding"]) == (257, "bytes")


WRONG = [
    ("--preset tyni", "Did you mean tiny"),
    ("--heads 3", "heads=3, channels=128. Try heads=4"),
    ("--steps 0", "steps=0"),
    ("--steps 10 --epochs 1", "steps=10, epochs=1"),
    ("--out TEXT", "must be a folder or new"),
    ("--out LINK", "must be a folder or new.*a link to nothing"),
    ("--out RUN", "must not hold a run already"),
    ("--batch-size 12 --batch-chunk 5", "must divide batch_size; got batch_chunk=5, batch_size=12. Try batch_chunk=6"),
    ("--accumulate 2 --batch-chunk 8", "batch_chunk=8, batch_size=4"),
    ("--optimizer adamm", "Did you mean adamw"),
    ("--sequence-length 64 --positions 32", "must not be longer than the model's positions"),
    ("--blocks 4096 --channels 65536 --heads 64", "must fit into"),
    ("--workers 2", "--workers must come with --plan"),
    ("--plan --timeline x", "--plan must come without .*timeline=x"),
    ("--timeline-steps 3", "must come with a timeline; got timeline_steps=3. Add --timeline"),
    ("--validation-data TEXT --held-out end", "must not be divided; got held_out=end, data=.*Leave out held_out"),
    ("--init RUN --validation-data TEXT --validation-fraction 0.3", "divided; got validation_fraction=0.3"),
    ("--rope-theta 500", "must come with rotary positions; got rope_theta=500"),
    ("--resume RUN --steps 1", "must have steps left"),
    ("--vocabulary 100", "must know every token id"),
    ("--encoding learn:1024 --vocabulary 1023", "must know every token id"),
]


@pytest.fixture
def nothing_slow(monkeypatch):
    """Fail where data are read, or kernels compiled."""
    monkeypatch.setattr(connect, "CONNECT_TIMEOUT", 0.3)
    monkeypatch.setattr("daskgpt.training.start.load_dataset", lambda *_, **__: pytest.fail("data are read"))
    for place in ("training.trainer", "bench", "study", "profiling.measure", "audit"):
        monkeypatch.setattr(f"daskgpt.{place}.compile_kernels", lambda *_: pytest.fail("kernels are compiled"))


@pytest.mark.usefixtures("nothing_slow")
@pytest.mark.parametrize(("flags", "said"), WRONG)
def test_what_is_wrong_is_said_before_data_are_read(flags, said, first, small_text, tmp_path):
    (tmp_path / "link").symlink_to("nothing")
    flags = flags.replace("TEXT", str(small_text)).replace("RUN", str(first)).replace("LINK", str(tmp_path / "link"))
    data = [] if "--resume" in flags else ["--data", small_text, "--batch-size 4"]
    out = [] if "--out" in flags or "--resume" in flags else ["--out", tmp_path / "run"]
    with pytest.raises((ValueError, OSError, RuntimeError), match=said):
        begin(*data, *out, flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("nothing_slow")
def test_fit_says_what_is_wrong_before_data_are_read(first, small_text):
    config, data = daskgpt.preset("tiny", blocks=1), {"data": str(small_text)}
    with pytest.raises(ValueError, match="names must be the table's"):
        daskgpt.fit(config, data, parameters={})
    with pytest.raises(RuntimeError, match="scheduler must answer"):
        daskgpt.fit(config, data, dataflow={"scheduler": "127.0.0.1:1"})
    with pytest.raises(RuntimeError, match="scheduler must answer"):
        daskgpt.fit(resume=first, dataflow={"scheduler": "127.0.0.1:1"})
    with pytest.raises(RuntimeError, match="scheduler must answer"):
        daskgpt.measure(config, {"batch_size": 4}, {"one": {"scheduler": "127.0.0.1:1"}})


@pytest.mark.usefixtures("nothing_slow")
@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (train, []),
        (prepare, ["missing.txt", "--out", "tokens"]),
        (bench, []),
        (audit, ["missing"]),
        (rewind, ["missing", "--step", "1"]),
        (study, ["--quick", "--out", "study"]),
    ],
)
def test_every_command_checks_its_scheduler_first(command, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flag = "--scheduler"
    with pytest.raises(RuntimeError, match=r"a Dask scheduler must answer; got scheduler=tcp://127\.0\.0\.1:1"):
        command.main([*arguments, flag, "127.0.0.1:1"])
    with pytest.raises(ValueError, match=r"must be a name, .*; got scheduler=thread\. Did you mean threads\?"):
        command.main([*arguments, flag, "thread"])
    assert list(tmp_path.iterdir()) == []
