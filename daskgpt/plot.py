"""Draw the curves of runs: `python -m daskgpt.plot RUN... --out FILE`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from daskgpt.config.errors import refusal, require
from daskgpt.config.files import replacing
from daskgpt.config.flags import Parser, add_flags, from_flags, run_command
from daskgpt.config.settings import Checked, documented, setting
from daskgpt.instruments.plotting.curves_of_runs import read_runs

KINDS = (".png", ".svg", ".html")


@documented
@dataclass(frozen=True)
class PlotConfig(Checked):
    """What to draw."""

    out: str = setting("", f"file to write; its ending says how: {', '.join(KINDS)}", unit="file")
    smooth: int = setting(
        0, "take means over about so many steps; 0 = a hundredth of the longest run", unit="steps", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rule, advice = f"the file must end with {', '.join(KINDS)}", "Give --out FILE, say curves.png."
        require(Path(self.out).suffix in KINDS, "plot", rule, {"out": self.out or "nothing"}, advice)


def main(arguments: list[str]) -> int:
    """Read all runs, draw them, write the file."""
    flags = Parser(
        prog="daskgpt.plot",
        description="Draw loss against steps, tokens and time, learning rate and throughput of one run or of many.",
    )
    flags.add_argument("runs", metavar="RUN", nargs="+", help="run folder, or a file of metrics")
    add_flags(flags, PlotConfig)
    values = flags.parse_args(arguments)
    config: PlotConfig = from_flags(PlotConfig, values)
    kind = Path(config.out).suffix.removeprefix(".")
    require_extra(kind)
    runs = read_runs(values.runs, config.smooth)
    for run in runs:
        if run.remark:
            print(f"plot: {run.remark}", file=sys.stderr)
    if kind == "html":
        from daskgpt.instruments.plotting.interactive import page_of_runs  # Bokeh is loaded where it is needed

        content = page_of_runs(runs).encode()
    else:
        from daskgpt.instruments.plotting.picture import picture  # needs what an extra brings

        content = picture(runs, kind)
    with replacing(config.out, "plot") as file:
        file.write(content)
    print(f"plot written to {config.out}")
    return 0


def require_extra(kind: str) -> None:
    """Errors   RuntimeError where a picture is wanted and matplotlib is not installed"""
    if kind != "html" and find_spec("matplotlib") is None:
        rule, got = "matplotlib must be installed", {"out": f"a picture ({kind})"}
        advice = "Install it with pip install 'daskgpt[plot]', or write a page (.html)."
        raise refusal(RuntimeError, "plot", rule, got, advice)


if __name__ == "__main__":
    run_command(main)
