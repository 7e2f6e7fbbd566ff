"""Tables of measurements in the documentation, written from the data: `python benchmarks/measurements.py --write`.

The data are the records in `docs/measurements/*.jsonl`, a line each, which `--record` of the tools here adds
(`records.py`) and `python -m daskgpt.bench --json` prints. A page has places for them:

    <!-- measured: NAME -->       the table of this name, one of TABLES here; `facts FILE` is a plain one of any file
    <!-- end -->

Without --write, the tool lists the pages that disagree with the data, and exits with 1 if there are any.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from records import Figure, Record, read_records
from toolz import groupby

ROOT = Path(__file__).parent.parent
DATA = ROOT / "docs" / "measurements"
PLACE = re.compile(r"(<!-- measured: (?P<name>[^\n]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
Rows = Iterable[tuple[str, ...]]


def pages() -> list[Path]:
    """Every page that may have places."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "cluster" / "README.md"]


def records(file: str) -> list[Record]:
    return read_records(DATA / f"{file}.jsonl")


def number(value: float, digits: int | None = None) -> str:
    """Format a number with given decimals, or with three significant digits; large numbers keep all integer digits."""
    if digits is not None:
        return f"{value:,.{digits}f}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def as_written(value: float, digits: int | None = None) -> str:
    """All digits that the data have."""
    return f"{value:,.10g}"


def spread(figure: Figure, factor: float = 1, digits: int | None = None, shown: Callable[..., str] = number) -> str:
    """`30.1 (29.8 .. 30.5)`: the median and the quartiles, else the ends; `29.8 .. 30.5` where no median is known."""
    low, high = (figure.least, figure.largest) if figure.q1 is None else (figure.q1, figure.q3)
    ends = "" if low is None else f"{shown(low * factor, digits)} .. {shown(high * factor, digits)}"
    if figure.median is None:
        return ends
    middle = shown(figure.median * factor, digits)
    return f"{middle} ({ends})" if ends else middle


def percent(figure: Figure) -> str:
    return f"{figure.median:.0%}".replace("%", " %")


def model(record: Record) -> str:
    settings = record.settings
    return f"{settings['preset']}, B={settings['batch_size']}, T={settings['sequence_length']}"


def table(head: str, rows: Rows) -> list[str]:
    columns = head.split(" | ")
    return [f"| {head} |", "|" + "---|" * len(columns), *(f"| {' | '.join(row)} |" for row in rows)]


def steps() -> list[str]:
    """Steps of daskgpt and PyTorch, on one processor below the other."""

    def row(one: Record) -> tuple[str, ...]:
        times = (spread(one.figures[name]) for name in ("ours", "theirs"))
        named = model(one), one.settings["precision"], one.machine["processor"]
        return *named, *times, spread(one.figures["ratio"], digits=2)

    rows = [row(one) for one in records("steps")]
    models = [named[:2] for named in rows]
    rows.sort(key=lambda named: models.index(named[:2]))
    return table("model, batch | precision | processor | daskgpt, ms a step | PyTorch | ratio", rows)


def limits() -> list[str]:
    """Kernels beside what the machine allows."""

    def row(one: Record) -> tuple[str, ...]:
        time, share, allowed, quotient = (one.figures[name] for name in ("time", "share", "allowed", "quotient"))
        cells = model(one), f"`{one.settings['what']}`", spread(time), percent(share), spread(allowed)
        return *cells, one.settings["by"], spread(quotient, digits=2)

    return table("model, batch | calls | ms a step | share | allowed | by | quotient", map(row, records("limits")))


def layers() -> list[str]:
    """Attention and the head beside PyTorch's."""

    def row(one: Record) -> tuple[str, ...]:
        held = (spread(one.figures[name]) if name in one.figures else "" for name in ("peak", "peak_theirs"))
        times = (spread(one.figures[name]) for name in ("ours", "theirs"))
        return one.settings["what"], *times, spread(one.figures["ratio"], digits=2), *held

    head = "what | daskgpt, ms | PyTorch, ms | ratio | daskgpt's peak, MB | PyTorch's, MB"
    return table(head, map(row, records("layers")))


def torch_ddp() -> list[str]:
    def row(one: Record) -> tuple[str, ...]:
        figures = one.figures
        times = (spread(figures[name], 1e-3) for name in ("cluster", "threads", "theirs"))
        return (
            model(one),
            one.settings["precision"],
            one.machine["processor"],
            *times,
            spread(figures["ratio"], digits=2),
            spread(figures["throughput_of_threads"], digits=2),
        )

    head = "model, batch | precision | processor | 2 workers, s a step | 2 threads | PyTorch DDP"
    return table(f"{head} | workers' time / DDP's | workers' throughput / threads'", map(row, records("torch_ddp")))


def generation() -> list[str]:
    figures = records("generation")[-1].figures
    ways = [name.removesuffix("_step").split("_") for name in figures if name.endswith("_step")]
    rows = []
    for way in ways:
        step, tokens, share = (figures["_".join([*way, name])] for name in ("step", "tokens", "share"))
        rows.append((*way, spread(step), spread(tokens), spread(share, digits=2)))
    return table("precision | texts | after tokens | ms a step | tokens/s | share of a copy's rate", rows)


def generation_compared() -> list[str]:
    figures = records("generation")[-1].figures
    names = {
        "copy": "a copy of memory in the same turns, read and written, GB/s",
        "flat_float32": "a late token / an early one, float32",
        "flat_bfloat16": "the same, bfloat16",
        "batch_float32": "tokens/s of eight texts / of one, float32",
        "batch_bfloat16": "the same, bfloat16",
        "theirs": "transformers, ms a token, prompt included",
        "rate_float32": "transformers' time / daskgpt's, turn by turn",
    }
    return table("what | found", ((words, spread(figures[name])) for name, words in names.items() if name in figures))


def fork_join() -> list[str]:
    waits = {
        "layer": "after each layer (fork-join)",
        "phase": "after forward, backward, update",
        "step": "after the step",
        "none": "nowhere",
    }

    def row(one: Record) -> tuple[str, ...]:
        figures = one.figures
        times = (spread(figures[name]) for name in ("step_1", "step_2"))
        shares = (percent(figures[name]) for name in ("efficiency_2", "overlap"))
        return waits[one.settings["barrier"]], *times, *shares, spread(figures["critical_path"])

    head = (
        "all threads wait | 1 thread, ms a step | 2 threads | efficiency | two or more layers at once | critical path"
    )
    return table(head, map(row, records("fork_join")))


def predictions() -> list[str]:
    """Predicted and measured times of a step, and how far they are apart."""
    summary, *configurations = records("predictions")

    def row(one: Record) -> tuple[str, ...]:
        figures, names = one.figures, ("error", "error of the ratio")
        errors = (f"{figures[name].median:+.1f} %" if name in figures else "" for name in names)
        return one.settings["what"], spread(figures["predicted"]), spread(figures["measured"]), *errors

    told = ", ".join(f"{name} {figure.text(2)}" for name, figure in summary.figures.items())
    head = "model, batch, dials | predicted, ms a step | measured | error | error of the ratio"
    return [f"{len(configurations)} configurations: {told}.", "", *table(head, map(row, configurations))]


def scaling() -> list[str]:
    """Predicted speedups on threads, over one thread, and efficiencies on nodes, over one node."""
    predicted = {one.settings["what"]: one.figures for one in records("scaling_predicted")}
    threads, nodes = (16, 64, 128), (4, 16)

    def ratio(name: str, base: str, factor: float = 1) -> str:
        if name not in predicted:
            return ""
        first, step = predicted[base]["step"].median or 0.0, predicted[name]["step"]
        low, middle, high = (factor * first / (value or 1.0) for value in (step.largest, step.median, step.least))
        return f"{number(middle)} ({number(low)} .. {number(high)})"

    rows = []
    for model, kind in dict.fromkeys((name.split(", ")[0], name.split(", ")[1]) for name in predicted):
        what = f"{model}, {kind}"
        speedups = (ratio(f"{what}, {n} threads", f"{model}, tasks, 1 threads") for n in threads)
        efficiencies = (ratio(f"{what}, {n} nodes of 16 threads", f"{what}, 1 nodes of 16 threads", 100) for n in nodes)
        rows.append((what, *speedups, *efficiencies))
    head = " | ".join(["", *(f"{n} threads" for n in threads), *(f"{n} nodes, %" for n in nodes)])
    return table(head, rows)


def bandwidths() -> list[str]:
    """Steps on hosts whose links are limited."""

    def row(one: Record) -> tuple[str, ...]:
        times = (spread(one.figures[name]) for name in ("cluster", "ddp"))
        named = one.settings["model"], one.settings["link"], one.machine["processor"]
        return *named, *times, spread(one.figures["ratio"], digits=2)

    head = "model | link of each host | processor | daskgpt, ms a step | PyTorch DDP"
    return table(f"{head} | daskgpt / DDP", map(row, records("bandwidths")))


def facts(file: str) -> list[str]:
    """A row a record: what was measured, every figure by name, and remarks.

    A row names its processor where most records have another one.
    """
    measurements = records(file)
    ((usual, _),) = Counter(one.machine["processor"] for one in measurements).most_common(1)

    def told(name: str, figure: Figure) -> str:
        turns = f", {figure.n} turns" if figure.n and figure.n > 1 else ""
        return f"{name} {spread(figure, shown=as_written)} {figure.unit}".strip() + turns

    def row(one: Record) -> tuple[str, ...]:
        figures = "; ".join(told(name, figure) for name, figure in one.figures.items())
        processor = one.machine["processor"]
        notes = processor != usual and f"{processor}.", one.against and f"Beside {one.against}.", one.note
        remarks = " ".join(note for note in notes if note)
        return str(one.settings["what"]), figures, f"`{one.command}`", one.date[:10], remarks

    lines = table("what | measured | command | date | remarks", map(row, measurements))
    for one in dict.fromkeys(map(_machine, measurements)):
        lines += ["", f"{one}."]
    return lines


def sources(file: str) -> list[str]:
    """The commands of a file's records, and where and when they ran, with the versions; the notes of all."""
    measurements, lines = records(file), []
    for place, of_place in groupby(lambda one: f"{one.date[:10]}, {_machine(one)}{_turns(one)}:", measurements).items():
        lines += [place, "", "```", *dict.fromkeys(one.command for one in of_place), "```", ""]
    notes = dict.fromkeys(one.note for one in measurements if one.note)
    return lines[:-1] + [line for note in notes for line in ("", note)]


def _machine(one: Record) -> str:
    machine = one.machine
    features = f" ({', '.join(machine['features'])})" if machine.get("features") else ""
    versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
    return f"{machine['processor']}, {machine['cores']} cores{features}; {versions}"


def _turns(one: Record) -> str:
    """How many, and which spread stands beside the medians."""
    with_spread = [figure for figure in one.figures.values() if (figure.least, figure.q1) != (None, None)]
    kinds = {"least and largest" if figure.q1 is None else "quartiles" for figure in with_spread}
    counts = {figure.n for figure in with_spread if figure.n}
    turns = f"; {max(counts)} turns" if counts else ""
    return turns + (f"; medians with {' or '.join(sorted(kinds))}" if kinds else "")


def default_run() -> list[str]:
    """The last lines that the default run printed."""
    medians = {name: figure.median for name, figure in records("training")[0].figures.items()}
    losses = f"loss {medians['first loss']:.3f} nats a token in the first step, {medians['last loss']:.3f} in the last"
    return [
        "```",
        f"{losses}, {medians['validation']:.3f} on held-out text",
        f"2,000 steps in {medians['steps']:.1f} s, {medians['in all']:.1f} s in all",
        "```",
    ]


TABLES: dict[str, Callable[[], list[str]]] = {
    "steps": steps,
    "limits": limits,
    "layers": layers,
    "torch-ddp": torch_ddp,
    "generation": generation,
    "generation compared": generation_compared,
    "fork-join": fork_join,
    "default run": default_run,
    "predictions": predictions,
    "scaling": scaling,
    "bandwidths": bandwidths,
}
OF_A_FILE: dict[str, Callable[[str], list[str]]] = {"facts": facts, "sources": sources}


def rendered(text: str) -> str:
    """A page with every place filled anew.

    Errors   KeyError for a place of an unknown name
    """

    def filled(place: re.Match[str]) -> str:
        kind, _, file = place["name"].partition(" ")
        lines = OF_A_FILE[kind](file) if kind in OF_A_FILE else TABLES[place["name"]]()
        return place[1] + "\n".join(("", *lines, "", place[3]))

    return PLACE.sub(filled, text)


def main(arguments: list[str]) -> int:
    stale = []
    made = [(page, rendered(page.read_text())) for page in pages()]
    for page, new in made:
        if not page.exists() or page.read_text() != new:
            stale.append(page)
            if "--write" in arguments:
                page.write_text(new)
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'written' if '--write' in arguments else 'differs from the data'}")
    return int(bool(stale) and "--write" not in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
