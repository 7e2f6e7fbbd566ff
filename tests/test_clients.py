"""Clients of other people's clusters: a run borrows one and leaves nothing; the address that the environment names."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref

import dask
import numpy as np
import pytest
from command_lines import PATIENCE, write_text
from conftest import SMALL
from distributed import Client, LocalCluster, SchedulerPlugin, wait
from machines import Machines
from test_cluster import ROOT, wait_until

import daskgpt
from daskgpt.graph.calls import KernelCall
from daskgpt.graph.nodes import as_it_is, task
from daskgpt.graph.program import calls_of
from daskgpt.graph.recording import AHEAD, Submission
from daskgpt.schedulers.addresses import chosen_address
from daskgpt.schedulers.cluster import BETWEEN_TASKS, SENT, ClusterScheduler, client_address
from daskgpt.schedulers.durations import TYPICAL, TypicalDurations
from daskgpt.schedulers.forgetting import TAG, span_annotation
from daskgpt.schedulers.members import running
from daskgpt.schedulers.sent_programs import SentPrograms
from daskgpt.schedulers.staying import StayAtHome
from daskgpt.schedulers.usage import METRIC, Usage
from daskgpt.schedulers.workers import take_spans
from daskgpt.training.step import TrainingStep

CONFIG = daskgpt.GPT2Config(blocks=2, heads=2, channels=32, vocabulary=257, positions=16)
DATA = {"batch_size": 4, "sequence_length": 16, "data": __file__}
RUN = {"steps": 4, "validation_batches": 1}
PEAK = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss"  # [KiB]


@pytest.fixture(scope="module")
def cluster():
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(**options) as cluster, Client(cluster):  # a client of somebody else, who stays
        yield cluster


@pytest.fixture(scope="module")
def by_threads():
    return fit(dataflow={"scheduler": "threads"})


def fit(**options):
    return daskgpt.fit(CONFIG, DATA, run=options.pop("run", RUN), quiet=options.pop("quiet", True), **options)


def left_on(dask_scheduler):
    """What a scheduler still has of any run: tasks, and plugins of its own or for workers."""
    plugins = [name for name in (*dask_scheduler.plugins, *dask_scheduler.worker_plugins) if "daskgpt" in name]
    return [str(key) for key in dask_scheduler.tasks], plugins


def plugins_of(dask_worker):
    return [name for name in dask_worker.plugins if "daskgpt" in name]


def test_a_run_borrows_a_client_and_leaves_nothing(cluster, by_threads, capsys):
    with Client(cluster) as client:
        kept = client.submit(sum, [1, 2])
        for _ in range(2):  # and the next one finds all as the first one did
            found = fit(client=client, quiet=False)
            assert found.losses == by_threads.losses
            assert all(np.array_equal(found.parameters[name], own) for name, own in by_threads.parameters.items())
            assert client.status == "running"
            assert kept.result() == 3
            assert list(client.futures) == [kept.key]
            wait_until(lambda: client.run_on_scheduler(left_on) == ([str(kept.key)], []))
            assert set(map(tuple, client.run(plugins_of).values())) == {()}
    assert f"scheduler  LocalCluster at {cluster.scheduler_address}, 2 workers, dashboard " in capsys.readouterr().out


def test_the_first_of_two_runs_at_once_takes_nothing_from_the_other(cluster, by_threads):
    with Client(cluster) as client, Client(cluster) as other:

        def run_another(step, metrics):
            if step == 0:
                before = plugins()
                assert fit(client=other).losses == by_threads.losses
                wait_until(lambda: plugins() == before)
                assert all(METRIC in names for names in client.run(metrics_of).values())

        def plugins():
            return client.run_on_scheduler(left_on)[1], client.run(plugins_of)

        assert fit(client=client, on_step=run_another).losses == by_threads.losses
        wait_until(lambda: client.run_on_scheduler(left_on) == ([], []))
        assert set(map(tuple, client.run(plugins_of).values())) == {()}
        assert not any(METRIC in names for names in client.run(metrics_of).values())


def metrics_of(dask_worker):
    return list(dask_worker.metrics)


def test_a_run_that_ends_with_an_error_leaves_nothing_either(cluster):
    def stop(step, metrics):
        raise KeyError("enough")

    with Client(cluster) as client:
        with pytest.raises(KeyError, match="enough"):
            fit(client=client, on_step=stop)
        assert client.status == "running"
        assert client.run_on_scheduler(left_on)[1] == []


def test_a_run_is_gone_on_with_by_a_client(cluster, by_threads, tmp_path):
    out = str(tmp_path / "run")
    with Client(cluster) as client:
        fit(run=RUN | {"out": out, "steps": 2}, optimizer={"schedule": "constant"}, client=client)
        found = daskgpt.fit(resume=out, run={"steps": 4}, client=client, quiet=True)
        assert len(found.losses) == 4
        assert cluster.scheduler_address in (tmp_path / "run" / "config.toml").read_text()
    whole = fit(optimizer={"schedule": "constant"}, dataflow=daskgpt.DataflowConfig(scheduler="sync"))
    assert found.losses == whole.losses


def test_a_client_takes_the_place_of_a_scheduler(cluster, by_threads):
    with Client(cluster) as client:
        chosen = daskgpt.DataflowConfig(scheduler="tcp://127.0.0.1:1", batch_chunk=2)
        assert fit(client=client, dataflow=chosen).losses == by_threads.losses


def test_what_is_no_client_is_refused():
    with pytest.raises(TypeError) as caught:
        fit(client="tcp://127.0.0.1:8786")
    assert str(caught.value) == (
        "open_scheduler: the client must be a distributed.Client that waits for results; "
        "got client='tcp://127.0.0.1:8786'. Give Client(cluster), not asynchronous=True."
    )


def test_a_client_that_does_not_wait_is_refused(cluster):
    async def give():
        async with Client(cluster.scheduler_address, asynchronous=True) as client:
            client_address(client)

    with pytest.raises(TypeError, match=r"must be a distributed\.Client that waits for results"):
        asyncio.run(give())


def test_a_closed_client_is_refused(cluster):
    client = Client(cluster)
    client.close()
    with pytest.raises(RuntimeError) as caught:
        fit(client=client)
    assert str(caught.value) == (
        "open_scheduler: the client must be connected; got client=closed. Open one that lives as long as the run."
    )


@pytest.mark.parametrize(
    ("setting", "address"),
    [
        (None, "threads"),
        ("", "threads"),
        ("tcp://127.0.0.1:8786", "tcp://127.0.0.1:8786"),
        ("127.0.0.1:8786", "tcp://127.0.0.1:8786"),
        ("tls://node0:8786", "tls://node0:8786"),
    ],
)
def test_auto_is_dasks_scheduler_address_or_threads(setting, address):
    with dask.config.set({"scheduler-address": setting}):
        assert chosen_address("auto") == address
        assert chosen_address("sync") == "sync"


@pytest.mark.slow
def test_the_environment_names_the_scheduler_and_the_header_says_so(by_threads, tmp_path):
    size = "--blocks 2 --heads 2 --channels 32 --batch-size 4 --sequence-length 16 --steps 4 --validation-batches 1"
    flags = [*size.split(), "--data", __file__, "--out", str(tmp_path / "run"), "--sample-tokens", "0"]
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        own = os.environ | {"DASK_SCHEDULER_ADDRESS": cluster.scheduler_address.removeprefix("tcp://")}
        command = [sys.executable, "-m", "daskgpt.train", *flags]
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    said = f"scheduler  cluster at {cluster.scheduler_address} (DASK_SCHEDULER_ADDRESS), 1 workers, dashboard "
    assert said in done.stdout
    assert f'scheduler = "{cluster.scheduler_address}"' in (tmp_path / "run" / "config.toml").read_text()


def durations(dask_scheduler):
    return {name: prefix.duration_average for name, prefix in dask_scheduler.task_prefixes.items()}


def test_tasks_of_a_new_name_have_a_typical_duration_and_others_are_left_alone():
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(TypicalDurations(client))
        with dask.annotate(**span_annotation()):
            ours = client.submit(sum, [1], key="tokens.forward-1")
        theirs = client.submit(sum, [2], key="theirs-1")
        wait_until(lambda: len(client.run_on_scheduler(durations)) == 2)
        assert client.run_on_scheduler(durations) == {"tokens.forward": TYPICAL, "theirs": -1}
        del ours, theirs


def test_what_workers_did_is_told_of_each(cluster):
    with Client(cluster) as client, daskgpt.open_scheduler(client=client) as scheduler:
        usage = Usage(scheduler)
        usage.begin()
        assert usage.news() == {}, "so soon after the beginning"
        giver, taker = sorted(scheduler.addresses())
        names = {own["id"]: str(own["name"]) for own in client.scheduler_info(n_workers=-1)["workers"].values()}
        block = client.submit(np.ones, 100_000, workers=[giver], key="block")
        client.submit(np.sum, block, workers=[taker], key="sum").result()
        for _ in range(3):
            client.submit(time.sleep, 0.2, workers=[taker], pure=False).result()
        wait_until(lambda: sum(own["tasks"] for own in scheduler.told(METRIC).values()) >= 5)  # heartbeats
        news = usage.news(every=0)
        found = news["workers"]
        assert news["imbalance"] == pytest.approx(1, abs=0.2), "one of two did nearly all"
        assert set(found) == set(names.values())
        got, gave = found[name_of(client, taker)], found[name_of(client, giver)]
        assert min(got["received_bytes_per_s"], gave["sent_bytes_per_s"]) > 0 == gave["received_bytes_per_s"]
        told = scheduler.told(METRIC)
        assert told[name_of(client, taker)]["received"] == told[name_of(client, giver)]["sent"] == 800_000
        assert got["tasks_per_s"] > gave["tasks_per_s"] > 0
        assert got["idle"] < gave["idle"] <= 1
        lines = usage.lines()
        assert lines[0] == "workers      tasks/s   idle  received/s    sent/s"
        assert [line.split()[-1] for line in lines[1:3]] == [name_of(client, giver), name_of(client, taker)]
        assert lines[3].strip() == f"the busiest was {news['imbalance']:.0%} busier than the mean"


def test_workers_are_there_also_while_the_client_asks_for_an_answer_without_them(cluster):
    with dask.config.set({"distributed.client.scheduler-info-interval": "1ms"}), Client(cluster) as client:
        assert all(len(running(client)) == 2 for _ in range(300))


def test_a_span_does_not_keep_a_word_of_each_step(cluster):
    with Client(cluster) as client:
        fit(client=client)
        assert 0 < client.run_on_scheduler(graphs_told_of) <= 2


def graphs_told_of(dask_scheduler):
    """By the spans of ours, the most."""
    told = [own.metadata for own in dask_scheduler.extensions["spans"].spans.values() if own.name[-1] == TAG]
    return max(len(metadata["collections"]) for metadata in told if metadata)


def test_waiting_for_a_long_step_keeps_nothing_of_it(cluster, monkeypatch):
    monkeypatch.setattr("daskgpt.schedulers.cluster.LOOKING", 0.05)

    def step(scheduler):
        state = Witness()
        scheduler.settle([scheduler.client.submit(time.sleep, 0.3, pure=False)])
        return weakref.ref(state)

    with Client(cluster) as client, daskgpt.open_scheduler(client=client) as scheduler:
        gc.collect()
        gc.disable()
        try:
            assert step(scheduler)() is None
        finally:
            gc.enable()


class Witness:
    """Something of a step."""


def test_a_client_of_ours_keeps_few_of_the_graphs_that_it_has_sent():
    with daskgpt.open_scheduler("local", 1) as scheduler:
        for number in range(2 * SENT):
            scheduler.client.submit(sum, [number], pure=False).result()
        assert 0 < len(scheduler.client.scheduler_comm.recent_message_log) <= SENT


def test_a_worker_that_leaves_while_it_is_asked_what_it_has_recorded_is_left_out(monkeypatch):
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        run, gone = client.run, sorted(client.nthreads())[0]

        def leaving(function, **more):
            found = run(function, **more)
            if function is take_spans:
                client.retire_workers([gone])
            return found

        with daskgpt.open_scheduler(client=client) as scheduler:
            monkeypatch.setattr(client, "run", leaving)
            with scheduler.record() as found:
                pass
    assert len(found) == 1


def test_a_worker_that_stands_still_holds_up_nobody_who_asks_what_workers_do(tmp_path):
    with Machines(tmp_path, 2) as machines:
        machines.have(2)
        with daskgpt.open_scheduler(machines.address) as scheduler:
            usage = Usage(scheduler)
            usage.begin()
            wait_until(lambda: len(scheduler.told(METRIC)) == 2)
            machines.send("w0", signal.SIGSTOP)
            wait_until(lambda: set(usage.news(every=0).get("workers", ())) == {"w1"})
            machines.send("w0", signal.SIGCONT)
            wait_until(lambda: "w0" in usage.news(every=0).get("workers", ()))


def name_of(client, address):
    return str(client.scheduler_info(n_workers=-1)["workers"][address]["name"])


def test_a_run_tells_of_its_workers_and_a_local_one_does_not(cluster, tmp_path, capsys):
    fit(quiet=False, dataflow={"scheduler": "threads"})
    assert "workers " not in capsys.readouterr().out
    with Client(cluster) as client:
        fit(quiet=False, client=client)
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("workers      tasks/s   idle  received/s    sent/s")
    assert sorted(line.split()[-1] for line in lines[first + 1 : first + 3]) == ["0", "1"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--scheduler threads --performance-report dask.html",
            "train: Dask reports on clusters only; got scheduler=threads. Add --scheduler local, or take --timeline.\n",
        ),
        (
            "--performance-report dask.htm",
            "train: a report must be a page; got performance_report=dask.htm. Give a name that ends with .html.\n",
        ),
        (
            "--performance-report no/such/dask.html",
            "train: the report's folder must be there and writable; got performance_report=no/such/dask.html. "
            "Make it, or name another.\n",
        ),
    ],
)
def test_a_report_that_cannot_be_is_refused_before_anything_runs(flags, said, tmp_path):
    command = [sys.executable, "-m", "daskgpt.train", "--data", __file__, *flags.split()]
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=own, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    assert list(tmp_path.iterdir()) == []


def can_be_stolen(dask_scheduler):
    return len(dask_scheduler.extensions["stealing"].key_stealable)


@pytest.mark.parametrize("at_home", [True, False])
def test_tasks_with_a_home_cannot_be_stolen_and_weights_stay_with_their_owner(at_home):
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        for plugin in (TypicalDurations(client), *([StayAtHome(client)] if at_home else [])):
            client.register_plugin(plugin)
        owner, other = sorted(client.nthreads())
        home = {"workers": [owner], "allow_other_workers": True}
        with dask.annotate(**span_annotation()):
            weights = client.submit(np.ones, 1000, workers=[owner], key="adamw-1")
            fetched = client.submit(as_it_is, weights, workers=[other], key=f"{AHEAD}-1")
            wait(fetched)
            tasks = [client.submit(time.sleep, 2, **home, key=f"tokens.forward-{n}") for n in range(3)]
            wait_until(lambda: client.processing()[owner])
        assert (client.run_on_scheduler(can_be_stolen) == 0) == at_home
        assert set(client.who_has()[weights.key]) == {owner} or not at_home
        assert set(client.who_has()[fetched.key]) == {other}
        del tasks


class Priorities(SchedulerPlugin):
    """Notes the priorities of what comes: the least goes first."""

    name = "priorities"

    def __init__(self):
        self.found = {}

    def update_graph(self, scheduler, *, priority, **_):
        self.found |= priority


def test_a_task_that_another_worker_waits_for_goes_before_others(cluster):
    keys = [("own", 0), ("total", 0), ("update", 0)]
    needs = {("update", 0): [("total", 0)]}
    graph = {key: task(key, lambda *_: 0, needs.get(key, [])) for key in keys}
    with Client(cluster) as client:
        client.register_plugin(Priorities())
        scheduler = ClusterScheduler(client, "")
        homes = {("own", 0): 0, ("total", 0): 0, ("update", 0): 1}
        assert scheduler.fetch(scheduler.run(Submission(graph, {}, keys, homes=homes, awaited=[keys[1]]))) == [0] * 3
        found = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins["priorities"].found)
        client.unregister_scheduler_plugin("priorities")
    assert {key[0]: value[0] for key, value in found.items()} == {"own-0": 0, "total-0": -1, "update-0": 0}


def test_more_steps_are_not_more_to_pickle(cluster, monkeypatch):
    pickled, as_it_was = [], KernelCall.__getstate__

    def counted(call):
        pickled.append(call)
        return as_it_was(call)

    monkeypatch.setattr(KernelCall, "__getstate__", counted)
    counts = []
    with Client(cluster) as client:
        for steps in (4, 12):
            pickled.clear()
            fit(client=client, run=RUN | {"steps": steps})
            counts.append(len(pickled))
    assert counts[0] == counts[1] > 0


def test_a_program_is_sent_with_the_number_of_its_run():
    step = TrainingStep(SMALL, (4, 12), (2, 12), daskgpt.OptimizerConfig())
    programs = SentPrograms()
    node = next(node for node in step.runnable.graph.values() if calls_of(node))
    first, second = (pickle.loads(pickle.dumps(programs.in_run(node, run).func)) for run in (3, 4))
    assert first.pickled == second.pickled
    assert (first.run, second.run) == (3, 4)


@pytest.mark.parametrize("given", [None, "40ms"])
def test_dask_looks_after_a_cluster_of_ours_less_often_unless_somebody_has_said_how_often(given):
    name, (usual, _) = next(iter(BETWEEN_TASKS.items()))
    with dask.config.set({name: given or usual}), daskgpt.open_scheduler("local", 1) as scheduler:
        assert {name: scheduler.everywhere(dask.config.get, name) for name in BETWEEN_TASKS} == {
            each: [given if given and each == name else own] for each, (_, own) in BETWEEN_TASKS.items()
        }
        assert dask.config.get(name) == (given or usual), "of this process"


@pytest.mark.slow
def test_a_client_never_holds_the_state(tmp_path):
    """Made from a seed, trained and saved: what passes through the client is an array or two at a time."""
    text = write_text(tmp_path)
    with Machines(tmp_path, 2) as machines:
        peaks = {}
        for blocks in (1, 12):
            numbers = f"--blocks {blocks} --heads 4 --channels 320 --positions 16 --sequence-length 16 --batch-size 2"
            flags = f"{numbers} --steps 3 --save-every 2 --validate-every 0 --sample-tokens 0 --threads 1"
            code = (
                f"import resource, sys; from daskgpt.train import main; assert main(sys.argv[1:]) == 0; print({PEAK})"
            )
            command = [sys.executable, "-c", code, "--data", str(text), "--out", str(tmp_path / str(blocks))]
            command += ["--encoding", "bytes", "--scheduler", machines.address, *flags.split()]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            peaks[blocks] = int(done.stdout.splitlines()[-1]) * 1024
        parameters = daskgpt.load(tmp_path / "12")[1]
    state = 3 * sum(value.nbytes for value in parameters.values())
    assert state > 150e6
    assert peaks[12] - peaks[1] < state / 2
