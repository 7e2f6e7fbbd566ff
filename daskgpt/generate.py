"""Write text with a trained model: `python -m daskgpt.generate RUN_FOLDER`."""

from __future__ import annotations

from dataclasses import dataclass

from daskgpt.config.flags import Parser, add_flags, from_flags, run_command
from daskgpt.config.settings import Checked, documented, setting
from daskgpt.data.encodings import encode, get_encoding
from daskgpt.generation.readable import readable
from daskgpt.generation.sampling import sample
from daskgpt.training.job import compile_kernels
from daskgpt.training.run_folder import read_model_of, trained_with


@documented
@dataclass(frozen=True)
class GenerateConfig(Checked):
    """What to write."""

    prompt: str = setting("\n", "text to go on from")
    tokens: int = setting(200, "length of the text", unit="tokens", least=0)
    temperature: float = setting(0.8, "0 takes the likeliest token, 1 the model's own probabilities", least=0)
    top_k: int = setting(0, "choose among so many likeliest tokens, 0 = all", least=0)
    seed: int = setting(0, "seed of the choices", least=0)
    encoding: str = setting("", "bytes or gpt2; empty = the model's own")


def main(arguments: list[str]) -> int:
    """Print the prompt and what follows it, a token at a time."""
    flags = Parser(prog="daskgpt.generate", description="Write text with a trained model.")
    flags.add_argument("model", metavar="MODEL", help="run folder, or a model in any file that daskgpt.convert reads")
    add_flags(flags, GenerateConfig)
    values = flags.parse_args(arguments)
    options: GenerateConfig = from_flags(GenerateConfig, values)
    model = read_model_of(values.model)
    encoding_name, context = trained_with(values.model, model)
    encoding = get_encoding(options.encoding or encoding_name)
    prompt = encode(encoding, options.prompt).tolist()
    compile_kernels()
    tokens = sample(
        model.config,
        model.parameters,
        prompt,
        options.tokens,
        context=context,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    print(options.prompt, end="", flush=True)
    for text in readable(encoding, tokens):
        print(text, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    run_command(main)
