"""Turn a model into another program's files, or theirs into this one's.

IN is a run folder, a checkpoint, a model file of daskgpt (.safetensors) or llama.cpp (.gguf), or a folder with Hugging
Face's GPT-2, Llama or Qwen (config.json and model.safetensors). Without --to, the name of OUT decides the format:
.safetensors daskgpt, .gguf gguf (llama.cpp's; f16.gguf, bf16.gguf and q8_0.gguf have fewer bits per number), a name
without an ending a folder for Hugging Face. Adapters (train --lora) are merged into the model; --to peft writes them
alone, as a folder for Hugging Face's library peft.

Files of pickled Python objects are never opened, since they can run anything. If you trust one, these lines convert
it. A pytorch_model.bin of Hugging Face, with PyTorch and transformers installed:

    from transformers import AutoModelForCausalLM, AutoTokenizer
    AutoModelForCausalLM.from_pretrained("FOLDER").save_pretrained("NEW_FOLDER")
    AutoTokenizer.from_pretrained("FOLDER").save_pretrained("NEW_FOLDER")

A ckpt.pt of nanoGPT, with PyTorch and safetensors installed. nanoGPT has the exact GELU; GPT-2 and daskgpt have the
tanh form, which changes logits by some thousandths:

    import json, os, torch
    from safetensors.torch import save_file
    known = torch.load("ckpt.pt", map_location="cpu", weights_only=True)
    sizes, tensors = known["model_args"], {}
    for name, values in known["model"].items():
        name = name.removeprefix("module.").removeprefix("_orig_mod.").removeprefix("transformer.")
        if name == "lm_head.weight" or name.endswith(".attn.bias"):
            continue
        values = values.T if name.startswith("h.") and values.ndim == 2 else values
        tensors[name] = values.contiguous()
        if name.endswith("weight") and not name.startswith("w"):
            tensors.setdefault(name.replace("weight", "bias"), torch.zeros(values.shape[-1]))
    config = {"n_" + name: sizes["n_" + name] for name in ("layer", "head", "embd")}
    config |= {"model_type": "gpt2", "n_positions": sizes["block_size"], "vocab_size": sizes["vocab_size"]}
    os.makedirs("NEW_FOLDER")
    save_file(tensors, "NEW_FOLDER/model.safetensors", metadata={"format": "pt"})
    json.dump(config, open("NEW_FOLDER/config.json", "w"))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from daskgpt.config.errors import number_of, require
from daskgpt.config.flags import Parser, run_command
from daskgpt.formats.encoding import encoding_of, get_encoding, title_of, vocabulary_size
from daskgpt.formats.gguf import DTYPES, write_gguf
from daskgpt.formats.huggingface import write_huggingface, write_peft
from daskgpt.formats.safetensors import write_run_model
from daskgpt.formats.stored_model import StoredModel
from daskgpt.model.parameters import check_finite, parameter_count, tensors
from daskgpt.training.checkpoint import open_model_of

LLAMA_CONTEXT = 256  # llama.cpp rounds contexts up to multiples of this many tokens


def main(arguments: list[str]) -> int:
    """Convert a model, and print the files that were read and written."""
    flags = Parser(prog="daskgpt.convert", description=__doc__)
    flags.add_argument("source", metavar="IN", help="run folder, checkpoint, model file, or Hugging Face's folder")
    flags.add_argument("target", metavar="OUT", type=Path, help="what to write: a file, or a folder for Hugging Face")
    flags.add_argument("--to", choices=WRITERS, help="format to write (default: by the name of OUT)")
    values = flags.parse_args(arguments)
    target: Path = values.target
    kind = values.to or guessed(target)
    is_empty = target.is_dir() and kind in ("huggingface", "peft") and not any(target.iterdir())
    rule, advice = "what is written must be new", "Nothing is written over: name another."
    require(is_empty or not target.exists(), "convert", rule, {"path": target}, advice)
    rule, folder = "the folder must exist", target.parent
    require(folder.is_dir(), "convert", rule, {"folder": folder}, "Make it first.", FileNotFoundError)
    model = open_model_of(values.source)
    rule, advice = "the model must have adapters", "Give a run that was trained with --lora."
    require(kind != "peft" or bool(model.adapters), "convert", rule, {"model": values.source}, advice)
    print("\n".join(_read(model)), flush=True)
    check_finite("convert", model.parameters)
    WRITERS[kind](target, model)
    written = sorted(target.iterdir()) if target.is_dir() else [target]
    print("\n".join([f"wrote  {kind}: {target}", *_files(written)]))
    return 0


def guessed(target: Path) -> str:
    """Return the format of a file name.

    Errors   ValueError for a name that has none
    """
    if not target.suffix:
        return "huggingface"
    kinds = [kind for ending, kind in ENDINGS.items() if target.name.lower().endswith(ending)]
    rule = "the name must say the format (.safetensors, .gguf, or no ending for a folder)"
    require(bool(kinds), "convert", rule, {"path": target}, f"Add --to {' or '.join(WRITERS)}.")
    return kinds[-1]


def _encoding_of(model: StoredModel) -> str:
    """Return the encoding of a model, which may have fewer ids than the model; "" if it is unknown."""
    encoding = model.encoding or encoding_of(model.config.vocabulary)
    spare = model.config.vocabulary - vocabulary_size(encoding)
    return encoding if spare == 0 or (model.encoding and spare > 0) else ""


# What writes each format, and prints notes for the user.


def _to_huggingface(target: Path, model: StoredModel) -> None:
    having = f"{title_of(model.encoding)} has more than" if model.encoding else "no encoding here has"
    encoding, reason = None, f"{having} {model.config.vocabulary:,} token ids"
    if name := _encoding_of(model):
        try:
            encoding = get_encoding(name)
        except FileNotFoundError as error:  # the model is of use without
            reason = str(error)
    write_huggingface(target, model, encoding)
    if not encoding:
        print(f"note   no tokenizer: {reason}")


def _to_gguf(target: Path, model: StoredModel, dtype: str = "float32") -> None:
    encoding, rule = _encoding_of(model), "a model for llama.cpp must have an encoding, of no more ids than its own"
    got = {"vocabulary": model.config.vocabulary, "encoding": title_of(model.encoding) or "not said"}
    advice = "Convert the run folder, or a folder with its tokenizer."
    require(bool(encoding), "convert", rule, got, advice)
    write_gguf(target, model, get_encoding(encoding), dtype)
    if (most := model.config.positions) % LLAMA_CONTEXT:
        print(f"note   llama.cpp aborts beyond {most:,} tokens of prompt and answer together: limit them there (-n)")


WRITERS: dict[str, Callable[[Path, StoredModel], object]] = {
    "huggingface": _to_huggingface,
    "daskgpt": write_run_model,
    "gguf": _to_gguf,
    "peft": write_peft,
}
WRITERS |= {f"gguf-{dtype}": partial(_to_gguf, dtype=dtype) for dtype in DTYPES if dtype != "float32"}
# Formats by the endings of file names; the last one that fits counts.
ENDINGS = {".safetensors": "daskgpt", ".gguf": "gguf", "f16.gguf": "gguf-float16"}
ENDINGS |= {"bf16.gguf": "gguf-bfloat16", "q8_0.gguf": "gguf-q8_0"}


def _read(model: StoredModel) -> list[str]:
    config = model.config
    where = model.files[0] if len(model.files) == 1 else f"{model.files[0].parent}/"
    sizes = ", ".join(number_of(getattr(config, f"{part}s"), part) for part in ("block", "head", "channel", "position"))
    count = f"{parameter_count(config):,} parameters in {len(tensors(config))} tensors"
    ids = f"{config.vocabulary:,} token ids ({title_of(model.encoding) or 'encoding not said'})"
    lines = [f"read   {model.kind}, {model.dtype}: {where}", *_files(model.files)]
    return [*lines, f"       {sizes}", f"       {ids}, {count}"]


def _files(files: Sequence[Path]) -> list[str]:
    sizes = {path.name: path.stat().st_size for path in files}
    texts = {n: f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB" for n, size in sizes.items()}
    return [f"       {name:34} {text:>12}" for name, text in texts.items()]


if __name__ == "__main__":
    run_command(main)
