"""Turn text into folders of tokens that training reads.

INPUT is a file, a folder (all text below it that is not hidden) or a glob: text or lines of JSON, each of them
compressed (gzip) or not, or Parquet. The tokens are a pure function of the inputs and the flags, with any scheduler. To
continue after a stop, give the same command again.
"""

from __future__ import annotations

import shlex
import time

from tqdm import tqdm

from daskgpt.config.errors import number_of
from daskgpt.config.flags import Parser, called, run_command
from daskgpt.data.preparation import Preparation, PrepareConfig
from daskgpt.formats.encoding import title_of
from daskgpt.formats.token_files import Manifest, Part
from daskgpt.schedulers.opening import open_scheduler, require_scheduler


def main(arguments: list[str]) -> int:
    """Prepare the tokens and report the result."""
    begin = time.perf_counter()
    flags = Parser(prog="daskgpt.prepare", description=__doc__)
    flags.add_argument("inputs", metavar="INPUT", nargs="+", help="file, folder or glob")
    values, config = flags.read(arguments, PrepareConfig)
    require_scheduler(config.scheduler)
    preparation = Preparation(values.inputs, config)
    with (
        open_scheduler(config.scheduler, config.threads) as scheduler,
        # Only for a terminal, where a user waits.
        tqdm(unit="B", unit_scale=True, disable=None, dynamic_ncols=True, desc="text") as line,
    ):
        manifest = preparation.run(scheduler.compute, line.update)
    took = "already existed" if preparation.existed else f"in {time.perf_counter() - begin:.1f} s"
    print("\n".join([*(f"text       {taken}" for taken in preparation.taken), *report(config.out, manifest, took)]))
    return 0


def report(folder: str, manifest: Manifest, took: str) -> list[str]:
    """Return lines on the content of a folder."""
    return [
        f"encoding   {title_of(manifest.encoding)}, {manifest.ids:,} ids",
        f"train      {_part(manifest.train)}",
        f"val        {_part(manifest.val)}",
        f"tokens written to {folder} {took}",
        f"train on them: {called('train')} --data {shlex.quote(folder)}",
    ]


def _part(part: Part) -> str:
    files, documents = number_of(len(part.shards), "file"), number_of(part.documents, "document")
    return f"{number_of(part.tokens, 'token')} of {part.bytes / 1e6:,.1f} MB in {files}, {documents}"


if __name__ == "__main__":
    run_command(main)
