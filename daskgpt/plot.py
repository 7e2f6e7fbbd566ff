"""Draw the curves of runs: `python -m daskgpt.plot RUN... --out FILE`."""

from __future__ import annotations

from pathlib import Path

from daskgpt.config.errors import require
from daskgpt.config.files import write_file
from daskgpt.config.flags import Parser, run_command


def main(arguments: list[str]) -> int:
    """Read all runs, draw them, write the file."""
    flags = Parser(
        prog="daskgpt.plot",
        description="Draw loss, learning rate, throughput and norm of gradients of one run or of many.",
    )
    flags.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folder, or a file of metrics")
    flags.add_argument("--out", metavar="FILE", type=Path, help="file to write, .png or .svg")
    values = flags.parse_args(arguments)
    kind, got = Path(values.out or "").suffix, {"out": values.out or "nothing"}
    require(kind in (".png", ".svg"), "plot", "out must end with .png or .svg", got, "Try --out curves.png.")
    from daskgpt.profiling.plots import picture, read_runs  # refuses to be imported without matplotlib

    content = picture(read_runs(values.runs), kind[1:])
    write_file(values.out, content, "plot")
    print(f"plot written to {values.out}")
    return 0


if __name__ == "__main__":
    run_command(main)
