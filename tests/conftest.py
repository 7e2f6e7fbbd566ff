"""Fixtures of many tests: the golden model, a small random model, and the schedulers."""

import io
import signal
from pathlib import Path

import numpy as np
import pytest
from batch_results import results_of
from command_lines import write_text
from llmc_samples import DEBUG_STATE, MODEL, read_debug_state, read_model
from machines import Machines
from small_runs import DISTURBED_STEPS, fit_in_parts

from daskgpt.config.model import ModelConfig
from daskgpt.kernels.compilation import compile_all
from daskgpt.model.parameters import parameter_shapes
from daskgpt.schedulers.opening import open_scheduler

GOLDEN = Path(__file__).parent / "golden"
SMALL = ModelConfig(blocks=2, heads=2, channels=16, vocabulary=29, padded_vocabulary=32, positions=16)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background ignores Ctrl-C for them, and their processes would inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session):
    """Compile kernels on all cores before processes of pytest-xdist start, each of which would compile them all."""
    config = session.config
    processes = config.getoption("numprocesses", None)
    if processes and config.args_source is pytest.Config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput"):
        compile_all(np.float32, processes=processes)
        compile_all(np.float64, bfloat16=False, processes=processes)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the files of tests/nightly/; the tests of a file share a process, as do all tests of the cluster."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent / "nightly"):
            item.add_marker(pytest.mark.nightly)
        if item.get_closest_marker("xdist_group") is None:
            group = "cluster" if "cluster" in getattr(item, "fixturenames", ()) else item.path.stem
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def golden_model():
    return read_model(MODEL)


@pytest.fixture(scope="session")
def golden_state(golden_model):
    return read_debug_state(DEBUG_STATE, golden_model[0])


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """The one cluster of a run of the tests: a scheduler and workers as processes, which tests may kill.

    Tests begin with `cluster.have(2)`, or as many workers as they need.
    """
    compile_all(np.float32)  # before several processes do it at the same time
    with Machines(tmp_path_factory.mktemp("cluster"), workers=2) as machines:
        yield machines


@pytest.fixture(scope="session")
def small_text(tmp_path_factory):
    """The path of a text that a small model learns in a few steps."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def whole(small_text, tmp_path_factory):
    """The folder of an undisturbed run with threads."""
    return fit_in_parts(small_text, tmp_path_factory.mktemp("whole") / "run", "threads", steps=DISTURBED_STEPS)


@pytest.fixture(autouse=True)
def handlers():
    """Handle signals after a test as before: once a command has ended, Ctrl-C would end the process of the tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def called(capsys, monkeypatch):
    """Call a command line in this process: its exit code and what it prints, where somebody has typed something."""

    def call(command, *arguments, typed=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        capsys.readouterr()
        code = command.main([str(argument) for argument in arguments])
        return code, capsys.readouterr().out

    return call


@pytest.fixture
def random():
    return np.random.default_rng(20)


def random_parameters(
    config: ModelConfig, random: np.random.Generator, dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """Return values large enough for nonzero gradients; rows of padding are 0."""
    values = {name: (random.normal(size=shape) * 0.3).astype(dtype) for name, shape in parameter_shapes(config).items()}
    values["wte.weight"][config.vocabulary :] = 0
    return values


def random_batch(config: ModelConfig, random: np.random.Generator, shape: tuple[int, int] = (4, 12)):
    return tuple(random.integers(0, config.vocabulary, shape).astype(np.int32) for _ in range(2))


def whole_logits(config, parameters, tokens):
    """Return the scores after each token of a text from the layers of training, without a cache."""
    batch = np.array([tokens], np.int32)
    with open_scheduler("sync", 1) as scheduler:
        return results_of(scheduler, config, parameters, (batch,), batch.shape)["logits"][0, :, : config.vocabulary]
