"""Draw the curves of runs: `python -m daskgpt.plot RUN... --out FILE`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from daskgpt.config.files import replacing
from daskgpt.config.flags import Parser, add_flags, from_flags, run_command
from daskgpt.config.settings import Checked, documented, setting


@documented
@dataclass(frozen=True)
class PlotConfig(Checked):
    """Settings of a drawing."""

    out: str = setting("", "file to write, .png or .svg", unit="file")
    smooth: int = setting(
        0, "average over about this many steps; 0 = a hundredth of the longest run", unit="steps", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if Path(self.out).suffix not in (".png", ".svg"):
            found = self.out or "nothing"
            raise ValueError(f"plot: out must end with .png or .svg; got out={found}. Try --out curves.png.")


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
    from daskgpt.profiling.plots import picture, read_runs  # refuses to be imported without matplotlib

    content = picture(read_runs(values.runs, config.smooth), Path(config.out).suffix[1:])
    with replacing(config.out, "plot") as file:
        file.write(content)
    print(f"plot written to {config.out}")
    return 0


if __name__ == "__main__":
    run_command(main)
