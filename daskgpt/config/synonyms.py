"""What other programs call the flags of this one, and which of theirs have no counterpart here."""

from __future__ import annotations

from collections.abc import Container

# Without leading dashes and with - for _.
_NAMES = {
    "learning-rate": "lr max-lr peak-lr base-lr alpha step-size",
    "final-learning-rate": "min-lr final-lr lr-min min-learning-rate",
    "schedule": "lr-schedule scheduler-type lr-scheduler lr-decay decay-lr",
    "warmup": "warmup-steps warmup-iters num-warmup-steps lr-warmup",
    "batch-size": "batch bs b micro-batch-size train-batch-size per-device-train-batch-size",
    "sequence-length": "block-size seq-len seq-length sequence context ctx context-length context-size n-ctx t",
    "blocks": "n-layer n-layers num-layers layers depth num-hidden-layers l",
    "heads": "n-head n-heads num-heads num-attention-heads attention-heads",
    "channels": "n-embd d-model embd embedding-size hidden-size width dim emb-dim",
    "vocabulary": "vocab vocab-size n-vocab",
    "positions": "n-positions max-positions max-position-embeddings",
    "preset": "model model-size size config arch",
    "cooldown": "decay-steps wsd-decay-steps lr-decay-iters cooldown-steps",
    "tokens": "max-tokens train-tokens token-budget",
    "minutes": "max-time time-limit max-minutes",
    "steps": "max-iters max-steps iterations iters num-steps n-steps num-iterations train-steps n",
    "init": "init-from load checkpoint ckpt from pretrained from-pretrained start-from weights",
    "out": "output out-dir output-dir save save-dir logdir log-dir o",
    "precision": "dtype amp bf16 bfloat16 mixed-precision fp32",
    "threads": "workers num-workers n-workers jobs num-threads nthreads cores j",
    "accumulate": "gradient-accumulation-steps grad-accum accumulation-steps accum micro-batches",
    "scheduler": "address cluster client backend",
    "data": "dataset input text file train-data data-path data-dir train-file i",
    "encoding": "tokenizer tokenization",
    "validate-every": "eval-interval eval-every val-every validation-interval validate-interval val-loss-every",
    "validation-batches": "eval-iters eval-batches val-batches eval-steps val-max-steps",
    "validation-fraction": "val-fraction val-split validation-split test-split val-ratio",
    "weight-decay": "wd l2 decay-rate",
    "dropout": "drop p-dropout dropout-rate attn-dropout resid-dropout embd-dropout attn-pdrop resid-pdrop embd-pdrop",
    "eps": "epsilon adam-eps adam-epsilon",
    "clip": "grad-clip clip-grad clip-grad-norm gradient-clipping max-norm max-grad-norm",
    "beta1": "adam-beta1 b1",
    "beta2": "adam-beta2 b2 betas",
    "sample-tokens": "sample samples sample-length max-new-tokens num-samples",
    "sample-every": "sample-interval generate-every samples-every",
    "seed": "random-seed rng",
    "batch-chunk": "chunk chunks chunk-size",
    "grain": "task-size granularity",
    "barrier": "barriers sync-mode",
    "local-steps": "inner-steps sync-every diloco",
    "replicas": "num-replicas n-replicas",
    "outer-learning-rate": "outer-lr",
    "resume": "resume-from resume-from-checkpoint continue continue-from restart",
    "save-every": "save-interval checkpoint-every checkpoint-interval save-steps",
    "keep": "save-total-limit keep-last max-checkpoints max-to-keep",
    "keep-best": "save-best save-best-only best-checkpoint load-best-model-at-end",
    "timeline": "profile trace",
    "plan": "dry-run",
}
SYNONYMS = {synonym: name for name, synonyms in _NAMES.items() for synonym in synonyms.split()}

_CPUS = "Everything runs on CPUs: --scheduler and --threads say where."
_EPOCHS = "A run is counted in --steps, --tokens or --minutes, and batches are drawn at random."
_CHECKPOINTS = "Checkpoints are always written: --save-every and --save-minutes say when, --keep how many stay."
_COMPILING = "Kernels are always compiled, at the first start on a machine."
_LOGGING = "Metrics are written to metrics.jsonl in the folder of --out, a line a step; --log says where else."
_OPTIMIZER = "--optimizer says how parameters are updated, AdamW where nothing is said."
_BIASES = "The layers are GPT-2's and have biases."

MISSING = {
    name: answer
    for names, answer in {
        "device gpu gpus cuda accelerator": _CPUS,
        "epochs epoch num-epochs num-train-epochs n-epochs": _EPOCHS,
        "always-save-checkpoint save-checkpoint": _CHECKPOINTS,
        "compile jit": _COMPILING,
        "wandb tensorboard log-interval log-every wandb-log logging": _LOGGING,
        "optim momentum sgd adam": _OPTIMIZER,
        "bias no-bias": _BIASES,
    }.items()
    for name in names.split()
}


def answer(flag: str, known: Container[str]) -> str:
    """What there is here for a flag of another program; nothing where that is not known.

    known   the flags of the command, with their dashes
    """
    name = flag.lstrip("-").lower().replace("_", "-")
    if name in MISSING and all(word.strip(",.:") in known for word in MISSING[name].split() if word.startswith("--")):
        return MISSING[name]
    own = f"--{SYNONYMS.get(name, '')}"
    return f"It is called {own} here." if own in known else ""
