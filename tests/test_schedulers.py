"""Tests of schedulers in this process: addresses, errors, recovery and workers of a cluster."""

import asyncio
import logging
import math
import os
import socket
import ssl
import threading
from collections import Counter
from types import SimpleNamespace

import dask
import pytest
from dask import bag
from distributed import Client, LocalCluster
from distributed.client import AllExit
from distributed.comm import CommClosedError
from machines import wait_until
from small_runs import MODEL, fit, metrics_of, same

import daskgpt
from daskgpt.schedulers import cluster, connect, links, opening, protocol, workers
from daskgpt.schedulers.cluster import ClusterScheduler
from daskgpt.schedulers.local import Pool, own_threads
from daskgpt.schedulers.protocol import METRIC, ClusterLost, WorkerLost
from daskgpt.training import recovery
from daskgpt.training.rank_engine import RankEngine
from daskgpt.training.recovery import RecoveryPoints

OPTIONS = {"threads_per_worker": 1, "processes": False, "dashboard_address": "127.0.0.1:0"}


@pytest.fixture(scope="module")
def threads():
    """Return a cluster of two workers in this process, and a borrowed client, which stays open."""
    with LocalCluster(n_workers=2, **OPTIONS) as cluster, Client(cluster):
        yield cluster


@pytest.fixture
def client(threads):
    with Client(threads) as client:
        yield client


@pytest.mark.parametrize(
    ("setting", "address", "resolved"),
    [
        (None, "auto", "threads"),
        ("127.0.0.1:8786", "auto", "tcp://127.0.0.1:8786"),
        ("tls://node0:8786", "sync", "sync"),
        ("tls://node0:8786", "file:", "tcp://10.0.0.1:5"),
        (None, " node0:8786/", "tcp://node0:8786"),
        (None, "[::1]:8786", "tcp://[::1]:8786"),
        (None, "tls://[::1]:8786/", "tls://[::1]:8786"),
        (None, "gateway://node0:443/cluster", "gateway://node0:443/cluster"),
    ],
)
def test_resolved_addresses(setting, address, resolved, tmp_path):
    (tmp_path / "scheduler.json").write_text('{"address": "tcp://10.0.0.1:5"}')
    address = f"file:{tmp_path / 'scheduler.json'}" if address == "file:" else address
    with dask.config.set({"scheduler-address": setting}):
        assert opening.resolved_address(address) == resolved


def test_threads_wait_on_processors_of_their_own_and_work_on_any():
    places = os.sched_getaffinity(0)
    for threads in (len(places), len(places) + 1):
        pool, together = Pool(threads), threading.Barrier(threads)

        def work(together=together):
            together.wait(60)
            return os.sched_getaffinity(0), threading.get_native_id()

        done = [future.result() for future in [pool.submit(work) for _ in range(threads)]]
        assert all(working == places for working, _ in done)
        waiting = [os.sched_getaffinity(thread) for _, thread in done]
        assert sorted(waiting, key=min) == (
            [{n} for n in sorted(places)] if threads == len(places) else [places] * threads
        )
        pool.shutdown()


def test_flags_that_continue_a_run_name_its_cluster():
    assert opening.resume_flags("my run", "auto") == "--resume 'my run'"
    assert opening.resume_flags("run", "tcp://[::1]:8786") == "--resume run --scheduler 'tcp://[::1]:8786'"


WRONG_ADDRESSES = ["", "http://127.0.0.1:8787/status", "tcp://node0", "node0:87866", "node0:0", "::1:8786", "[]:1"]


@pytest.mark.parametrize(
    ("address", "kind", "keyword"),
    [
        ("thread", ValueError, r"must be a name, .*; got scheduler=thread\. Did you mean threads\?"),
        *((address, ValueError, "with a port from 1 to 65535; .*tcp://HOST:PORT") for address in WRONG_ADDRESSES),
        ("tcp://127.0.0.1:1", RuntimeError, r"must answer; got scheduler=tcp://127\.0\.0\.1:1 \(Timed out"),
        ("tcp://nobody.invalid:1", RuntimeError, r"must answer; .*check the address \(--scheduler, DASK_"),
        ("tls://127.0.0.1:1", RuntimeError, r"ssl_context.*, DASK_CONFIG=none.yaml \(no .* needs DASK_CONFIG"),
        ("inproc://192.0.2.9/1/1", RuntimeError, "must answer"),
        ("file:none.json", RuntimeError, "file must hold an address; .*no such file"),
        ("file:FILE", RuntimeError, "file must hold an address; .*has no address"),
        ("SILENT", RuntimeError, "takes the connection and says nothing"),
        ("setting", ValueError, r"got scheduler=nowhere \(DASK_SCHEDULER_ADDRESS\)"),
    ],
)
def test_addresses_at_which_no_scheduler_answers(address, kind, keyword, tmp_path, monkeypatch):
    """They are found before anything slow, and by what opens a scheduler."""
    monkeypatch.setattr(connect, "CONNECT_TIMEOUT", 0.3)
    monkeypatch.setattr(opening, "FILE_SECONDS", 0.3)
    monkeypatch.setenv("DASK_CONFIG", "none.yaml")
    (file := tmp_path / "scheduler.json").write_text("[1, 2]")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = address.replace("FILE", str(file)).replace("SILENT", f"127.0.0.1:{silent.getsockname()[1]}")
        address, setting = ("auto", "nowhere") if address == "setting" else (address, None)
        with dask.config.set({"scheduler-address": setting}):
            with pytest.raises(kind, match=keyword), daskgpt.open_scheduler(address):
                pass
            with pytest.raises(kind, match=keyword):
                opening.require_scheduler(address)


def test_unusable_clients_are_refused(threads, small_text, monkeypatch):
    monkeypatch.setattr(connect, "WORKERS_TIMEOUT", 0.1)
    with pytest.raises(TypeError, match="distributed.Client"):
        fit(small_text, client="tcp://127.0.0.1:8786")

    async def give():
        async with Client(threads.scheduler_address, asynchronous=True) as client:
            connect.client_address(client)

    with pytest.raises(TypeError, match="asynchronous"):
        asyncio.run(give())
    closed = Client(threads)
    closed.close()
    with pytest.raises(RuntimeError, match="client=closed"):
        fit(small_text, client=closed)
    refusal = pytest.raises(RuntimeError, match="must have a worker")
    with LocalCluster(n_workers=0, **OPTIONS) as empty, Client(empty) as client, refusal:
        fit(small_text, client=client)


def test_losses_raise_one_error():
    kinds = ("running", WorkerLost, "worker"), ("closed", ClusterLost, "scheduler")
    closed = SimpleNamespace(status="closed", scheduler=None)
    with pytest.raises(ClusterLost, match="the client must live"), cluster.losses_as_errors(closed):
        raise AttributeError
    with pytest.raises(RuntimeError, match="^own$"), cluster.losses_as_errors(SimpleNamespace(status="running")):
        raise RuntimeError("own")  # of a task
    for status, kind, keyword in kinds:
        pool_errors = [RuntimeError("ConnectionPool is closed")] if status == "closed" else []
        for error in (*cluster.SIGNS[:1], *cluster.SIGNS[2:], *pool_errors):
            client = SimpleNamespace(status=status, scheduler=True)
            with pytest.raises(kind, match=keyword) as caught, cluster.losses_as_errors(client):
                raise error
            assert type(caught.value) is kind


def test_a_cluster_that_closes_ends_a_run_in_one_line(small_text):
    with LocalCluster(**OPTIONS) as cluster, Client(cluster) as client:

        def close(step, metrics):
            if step == 2:
                cluster.close()

        with pytest.raises(RuntimeError, match="must live until the end of a run"):
            fit(small_text, client=client, steps=10**6, on_step=close)


@pytest.mark.parametrize(
    ("count", "of", "grain", "barrier"), [(1, 2, "auto", "none"), (1, 2, "block", "none"), (2, 1, "auto", "step")]
)
def test_cluster_in_one_process_gives_the_bits_of_one_thread(count, of, grain, barrier, small_text):
    """Each worker chooses grain and chunks by the kernel calls of its own steps."""
    config = daskgpt.preset("tiny", blocks=2, heads=2, channels=64)
    settings = {"data": {"data": str(small_text), "sequence_length": 64}, "run": {"steps": 3, "validation_batches": 1}}
    alone = daskgpt.fit(config, **settings, dataflow={"scheduler": "sync"}, quiet=True)
    with LocalCluster(**OPTIONS | {"n_workers": count, "threads_per_worker": of}) as cluster, Client(cluster) as client:
        dials = {"grain": grain, "barrier": barrier}
        result = daskgpt.fit(config, **settings, dataflow=dials, client=client, quiet=True)
        assert result.losses == alone.losses
        assert daskgpt.digest(result.parameters) == daskgpt.digest(alone.parameters)


def where_it_runs():
    """Of a run that asks for no scheduler."""
    with daskgpt.open_scheduler() as scheduler:
        return scheduler.threads, scheduler.description


def test_sweep_runs_side_by_side_in_tasks(small_text):
    """Each run in a task has the task's thread, and the bits of a run that is alone."""

    def losses(seed):
        return fit(small_text, steps=4, seed=seed).losses

    alone = [losses(seed) for seed in range(4)]
    with LocalCluster(**OPTIONS | {"n_workers": 1, "threads_per_worker": 2}) as cluster, Client(cluster) as client:
        assert client.gather(client.map(losses, range(4))) == alone
        threads, description = client.submit(where_it_runs).result()
        assert (threads, description) == (1, "Dask's synchronous scheduler (in a task of a Dask worker)")
        assert client.submit(own_threads).result() == 1


def test_active_client_runs_what_asks_for_no_scheduler(threads, client, small_text, capsys):
    data, run = {"data": str(small_text), "batch_size": 4, "sequence_length": 16}, {"steps": 2, "validation_batches": 1}

    def said(**alone):
        daskgpt.fit(MODEL, data, run=run, **alone)
        return capsys.readouterr().out.splitlines()[0]

    used = f"scheduler  your active Client: LocalCluster at {threads.scheduler_address}, 2 workers"
    assert said().startswith(used)
    assert said(dataflow={"grain": "block"}).startswith(used)
    assert said(dataflow=daskgpt.DataflowConfig()).startswith(used)
    assert said(client=client).startswith(f"scheduler  LocalCluster at {threads.scheduler_address}, 2 workers")
    assert said(dataflow={"scheduler": "sync"}) == "scheduler  Dask's synchronous scheduler"
    assert where_it_runs()[0] == 2
    shared, alone = (daskgpt.plan(MODEL, data | {"groups": 2}, threads=count) for count in (0, 3))
    assert (shared.job.scheduler, shared.job.dataflow.threads, len(shared.sent)) == ("local", 2, 2)
    assert (alone.job.scheduler, alone.job.dataflow.threads) == ("threads", 3)

    async def within():
        async with Client(threads.scheduler_address, asynchronous=True):
            daskgpt.fit(MODEL, data, run=run)

    with pytest.raises(TypeError, match="asynchronous"):
        asyncio.run(within())


@pytest.mark.parametrize(
    ("run", "again"),
    [({"snapshot_every": 3}, 1), ({"snapshot_every": 0, "save_every": 5}, 3), ({"snapshot_every": 0}, 8)],
)
def test_recovery_continues_from_the_newest_state(client, small_text, run, again, tmp_path, monkeypatch):
    lost, steps_run = [], RankEngine.run

    def losing(self, *batches):
        if self.made == 8 and not lost:
            lost.append(self.made)
            raise WorkerLost("here", "a worker must live", "nothing")
        return steps_run(self, *batches)

    pending, copied = [], RankEngine._copies_of

    def copied_at_once(self, *packs, **apart):
        copies = copied(self, *packs, **apart)
        pending.extend(first for first, *_ in copies if not first.done())
        return copies

    fit(small_text, tmp_path / "whole", dataflow={"scheduler": "threads"}, **run)
    monkeypatch.setattr(RankEngine, "run", losing)
    monkeypatch.setattr(RankEngine, "_copies_of", copied_at_once)
    monkeypatch.setattr("daskgpt.training.rank_engine.WINDOW_SECONDS", 0)  # a step each
    fit(small_text, tmp_path / "run", client=client, **run)
    assert [record["lost_steps"] for record in metrics_of(tmp_path / "run") if "lost_steps" in record] == [again]
    assert same(tmp_path / "run", tmp_path / "whole")
    assert not pending, "later steps change a state in place"


def test_run_does_not_wait_for_a_worker_that_it_does_without(client, small_text, tmp_path, monkeypatch):
    """Such a worker may be noticed while a recovery point is made, which ends without an error."""
    steps_run = RankEngine.run

    def without_one(self, *batches):
        if self.made == 5 and not self.scheduler.apart.left_out:
            self.scheduler.apart.add(self.addresses[0])
        return steps_run(self, *batches)

    fit(small_text, tmp_path / "whole", dataflow={"scheduler": "threads"}, groups=4)
    monkeypatch.setattr(RankEngine, "run", without_one)
    monkeypatch.setattr("daskgpt.training.rank_engine.WINDOW_SECONDS", 0)  # a step each
    fit(small_text, tmp_path / "run", client=client, groups=4, snapshot_every=0)
    assert [record["lost_steps"] for record in metrics_of(tmp_path / "run") if "lost_steps" in record] == [5]
    assert same(tmp_path / "run", tmp_path / "whole")


def test_run_without_progress_between_losses_ends():
    job = SimpleNamespace(run=SimpleNamespace(snapshot_every=0))
    counted = recovery.Recovery(SimpleNamespace(scheduler=None, job=job), None, print, {})
    loss = WorkerLost("ClusterScheduler", "every worker must live until the end of a run", "KilledWorker")
    for done in range(20):
        counted.count(done, 0, loss)  # a step more each time
    for restart in range(1, 20):
        counted.count(19, restart, loss)  # from a later point each time
    for _ in range(recovery.MOST_IN_VAIN - 1):
        counted.count(19, 19, loss)
    with pytest.raises(ClusterLost, match="10 in a row at step=19; the last: KilledWorker"):
        counted.count(19, 19, loss)


def test_a_lost_cluster_is_reported_although_ranks_cannot_be_ended():
    """The call that ends the other ranks fails as well, and must not take the place of the first error."""

    def closed(*_, **__):
        raise OSError("ConnectionPool closing.")

    engine = RankEngine.__new__(RankEngine)
    engine.run_name, engine.epoch = "run", "epoch"
    engine.scheduler = SimpleNamespace(client=SimpleNamespace(run=closed, status="closed", scheduler=None))
    with pytest.raises(WorkerLost, match="a worker must live"), engine._aborting():
        raise WorkerLost("here", "a worker must live", "nothing")


def test_recovery_interval_follows_cost(monkeypatch):
    job = SimpleNamespace(run=SimpleNamespace(snapshot_every=-1))
    points = RecoveryPoints(SimpleNamespace(job=job, scheduler=None), print)
    points.cost = 0.1
    monkeypatch.setattr("daskgpt.training.recovery.time.monotonic", lambda: 0.0)
    due = []
    for points.soon, points.every, points.since in ((True, 0, 0), (False, -1, -7), (False, -1, -8), (False, 3, 0)):
        due.append(points._due(8))
    for points.kept in (SimpleNamespace(step=6), SimpleNamespace(step=5)):
        due.append(points._due(8))
    assert due == [True, False, True, True, False, True]
    assert points.interval == math.inf  # steps are counted


def test_the_last_recovery_point_decides_the_interval(monkeypatch):
    engine = SimpleNamespace(copied_apart=lambda: SimpleNamespace(packs=[]))
    engine.job = SimpleNamespace(run=SimpleNamespace(snapshot_every=-1))
    engine.scheduler = SimpleNamespace(wait_for=lambda handles: None)
    points, clock = RecoveryPoints(engine, print), iter([0.0, 2.0, 200.0, 200.5, 300.0, 301.0])
    monkeypatch.setattr(recovery, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for interval in (200, 50, 100):
        points._copy()
        assert points.interval == interval


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.filterwarnings("error:.*already contains a plugin")
def test_concurrent_runs_keep_their_plugins(same, threads, client, small_text):
    wanted = fit(small_text, client=client)

    def plugins():
        named = [*threads.scheduler.plugins, *threads.scheduler.worker_plugins]
        named += [name for worker in threads.workers.values() for name in (*worker.plugins, *worker.metrics)]
        return sorted(name for name in named if "daskgpt" in name)

    def run_another(step, metrics):
        if step == 0:
            before = plugins()
            assert fit(small_text, client=other).losses == wanted.losses
            wait_until(lambda: plugins() == before, "the other's plugins go")
            assert METRIC in before

    with Client(threads) as another:
        other = client if same else another
        wait_until(lambda: not plugins(), "all plugins go")
        assert fit(small_text, client=client, on_step=run_another).losses == wanted.losses
        wait_until(lambda: not plugins(), "all plugins go")


def test_workers_make_the_calls_of_concurrent_runs_in_one_order(threads, client):
    """Otherwise calls that wait for each other wait forever where a worker has fewer threads than there are runs."""
    addresses, runs = sorted(threads.scheduler.workers), [ClusterScheduler(client, "") for _ in range(2)]
    calls = [(address, os.getpid) for address in addresses]
    graphs = [run.submit_together("rank.window", calls) for run in runs * 5]
    wait_until(lambda: all(future.done() for graph in graphs for future in graph), "all calls are made")
    priorities = [[threads.scheduler.tasks[future.key].priority for future in graph] for graph in graphs]
    assert all(priorities == sorted(priorities, key=lambda graph: graph[place]) for place in range(len(addresses)))
    assert len({tuple(place[-1] for place in graph) for graph in priorities}) == 1, "runs in tasks have no other order"


def test_an_interrupted_reading_of_the_clock_does_not_count(monkeypatch):
    monkeypatch.setattr(protocol, "time", lambda: 100.0)
    readings = iter([40.0, 40.5, 48.0, 40.0, 41.0])  # some come late
    monkeypatch.setattr(protocol, "perf_counter", lambda: next(readings))
    assert protocol.clock_offset() == 60.0


def test_no_worker_at_all_is_a_loss_at_once():
    with LocalCluster(n_workers=0, **OPTIONS) as empty, Client(empty) as client:
        scheduler = ClusterScheduler(client, "")
        with pytest.raises(WorkerLost, match="got a worker, "):
            scheduler.fetch([scheduler.submit("call", os.getpid)])


@pytest.mark.parametrize("setting", ["20ms", "40ms"])
def test_local_cluster_address_and_intervals(setting, monkeypatch, recwarn):
    tick, asked = next(iter(connect.BETWEEN_TASKS)), {}

    def started(**options):
        asked.update(options, heap=dask.config.get(connect.SPAWN)["MALLOC_ARENA_MAX"])
        asked.update(tick=dask.config.get(tick))
        return LocalCluster(**options | {"processes": False, "protocol": "tcp"})

    monkeypatch.setattr(connect, "LocalCluster", started)
    with socket.socket() as taken, dask.config.set({tick: setting}):
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(connect, "DASHBOARD_PORT", taken.getsockname()[1])
        variables = dict(os.environ)
        active = opening.active_client()
        with daskgpt.open_scheduler("local", 1) as scheduler:
            assert opening.active_client() is active, "the run's own Client is not for others"
            assert scheduler.description.startswith("local cluster, 1 worker process, dashboard http://127.0.0.1:")
            assert f":{connect.DASHBOARD_PORT}/" not in scheduler.description
        assert not logging.getLogger("asyncio").filter(logged(AllExit)), "a wait that its end cuts short, freed later"
        assert dask.config.get(tick) == setting, "of this process"
        assert dict(os.environ) == variables
    assert not [warned for warned in recwarn if "Port" in str(warned.message)]
    wanted = {"n_workers": 1, "threads_per_worker": 1, "processes": True, "host": "127.0.0.1", "heap": "1"}
    wanted |= {"dashboard_address": f"127.0.0.1:{connect.DASHBOARD_PORT}"}
    assert asked == wanted | {"tick": "500ms" if setting == "20ms" else setting}


@pytest.mark.parametrize(
    ("error", "cause", "command", "said"),
    [
        (RuntimeError, TypeError("TLS expects\nmore"), False, r"TypeError: TLS expects\?more\. Check Dask's settings"),
        (KeyError, None, False, r"got KeyError: 'failed'\. Check Dask's settings"),
        (RuntimeError, RuntimeError("Nanny failed to start worker process"), False, "__main__"),
        (RuntimeError, RuntimeError("Nanny failed to start worker process"), True, "Check Dask's settings"),
    ],
)
def test_why_a_local_cluster_does_not_start(error, cause, command, said, monkeypatch):
    def start(**options):
        raise error("failed") from cause

    monkeypatch.setattr(connect, "LocalCluster", start)
    monkeypatch.setattr(connect, "IS_COMMAND", command)
    with pytest.raises(RuntimeError, match=said), daskgpt.open_scheduler("local", 1):
        pass


REACHED = ["tcp://192.0.2.2:1", "tcp://[2001:db8::2]:1", "tcp://node0:1", "ws://192.0.2.2:1"]
OWN = ["tcp://127.8.0.1:1", "tcp://[::1]:1", "tcp://localhost:1", "inproc://192.0.2.2/1/1", "tls://192.0.2.2:1"]


@pytest.mark.parametrize("host", REACHED + OWN)
def test_open_cluster_warns_once(host, monkeypatch, capsys):
    monkeypatch.setattr(connect, "_warned", set())
    for _ in range(2):
        connect.warn_of_open(["tcp://127.0.0.1:1", host])
    assert capsys.readouterr().err.count(f"no TLS: anyone who reaches {host} ") == (host in REACHED)


@pytest.mark.parametrize(
    ("template", "shown", "end"),
    [("{NOT_SET_HERE}/status", True, ""), ("http://a/{port}", True, "http://a/"), ("http://a/{port}", False, "")],
)
def test_the_site_decides_the_link_of_the_dashboard(template, shown, end):
    with (
        LocalCluster(**OPTIONS | {"n_workers": 1, "scheduler_kwargs": {"dashboard": shown}}) as cluster,
        Client(cluster) as client,
        dask.config.set({"distributed.dashboard.link": template}),
        connect.borrowed_cluster(client) as scheduler,
    ):
        described, _, link = scheduler.description.partition(", dashboard ")
    assert link.startswith(end)
    assert link.removeprefix(end).isdigit() if end else not link
    assert described


@pytest.mark.parametrize(
    ("address", "listens", "host"),
    [
        ("tcp://192.0.2.2:8786", "127.0.0.1", "127.0.0.1"),
        ("tls://192.0.2.2:8786", "0.0.0.0", "192.0.2.2"),
        ("tcp://[2001:db8::2]:8786", "::", "[2001:db8::2]"),
        ("inproc://192.0.2.2/1/1", "0.0.0.0", "localhost"),
    ],
)
def test_the_link_leads_to_where_the_dashboard_listens(address, listens, host, monkeypatch):
    monkeypatch.setattr(connect, "client_address", lambda client: address)
    link = connect.dashboard_link(SimpleNamespace(cluster=None), listens, 8787)
    assert link == f"http://{host}:8787/status"


def test_a_worker_with_tls_is_greeted_as_one():
    """Dask warns of every connection that ends before its handshake."""
    greetings = []

    async def listened(reader, writer):
        greetings.append(await reader.read(1))
        writer.close()

    async def attempted():
        async with await asyncio.start_server(listened, "127.0.0.1", 0) as server:
            addresses = [f"{kind}://127.0.0.1:{server.sockets[0].getsockname()[1]}" for kind in ("tls", "tcp")]
            worker = SimpleNamespace(connection_args={"ssl_context": ssl.create_default_context()})
            for address in addresses:
                assert await links.unreached([address], dask_worker=worker) == {}
            while len(greetings) < len(addresses):
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(attempted(), 60))
    assert greetings == [b"\x16", b""]  # the begin of a handshake, and none


def test_the_scheduler_must_have_the_package(monkeypatch):
    def missing(self, *_, **__):
        raise ModuleNotFoundError("No module named 'daskgpt'")

    with LocalCluster(**OPTIONS | {"n_workers": 1}) as cluster, Client(cluster) as client:
        monkeypatch.setattr(Client, "run_on_scheduler", missing)
        with pytest.raises(RuntimeError, match="the scheduler must be able to import daskgpt"):
            connect._require_reachable(ClusterScheduler(client, ""))


def test_identity_covers_every_source_file(tmp_path, monkeypatch):
    assert {"daskgpt", "numpy", "numba", "bfloat16 products"} <= workers.identity(True).keys()
    assert "bfloat16 products" not in workers.identity(False)
    monkeypatch.setattr(daskgpt, "__file__", str(tmp_path / "__init__.py"))
    digests = []
    for name, words in (("a.py", "1"), ("a.txt", "1"), ("a.py", "2"), ("b.py", "")):
        (tmp_path / name).write_text(words)
        digests.append(workers._sources.__wrapped__())
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_refused_worker_compiles_nothing(monkeypatch):
    """Its event loop would be blocked meanwhile, so that it would seem to be silent instead of gone."""
    monkeypatch.setattr(workers, "compile_all", refuse)
    monkeypatch.setattr(workers.internals, "refuse_work", lambda worker: ended.append(worker))
    monkeypatch.setattr(workers.PrepareWorker, "users", Counter())
    ended, worker = [], SimpleNamespace(address="tcp://127.0.0.1:1", id="other")
    check = workers.VersionCheck("run", False, [])
    check.expected = check.expected | {"daskgpt": "another"}
    check.setup(worker)
    asyncio.run(workers.PrepareWorker("run").setup(worker))
    assert ended == [worker]


@pytest.mark.parametrize("name", ["sync", "threads", "a cluster"])
def test_bags_are_computed(name, client):
    """Results are taken partition by partition, and the first error ends the computation."""
    numbers = bag.from_sequence(range(-3, 7), partition_size=2)
    taken = []
    with daskgpt.open_scheduler(name, 2, client if name == "a cluster" else None) as scheduler:
        scheduler.compute(numbers.map(hex), taken.append)
        assert sorted(taken) == sorted([list(map(hex, (n, n + 1))) for n in range(-3, 7, 2)])
        with pytest.raises(ValueError, match="domain"):
            scheduler.compute(numbers.map(math.log), taken.append)
        with pytest.raises(KeyError, match="enough"):
            scheduler.compute(numbers.map(abs), refuse)


def refuse(result):
    raise KeyError("enough")


def logged(kind):
    """What Dask or asyncio logs of an error in a heartbeat, or of a task that nobody waits for any more."""
    return logging.LogRecord("asyncio", logging.ERROR, "", 0, "in a heartbeat", (), (kind, kind(), None))


def test_what_the_end_of_a_cluster_cuts_short_is_not_logged():
    for shows, kind in ((connect.is_shown, AllExit), (links.is_not_reported, CommClosedError)):
        assert not shows(logged(kind))
        assert shows(logged(ValueError))
