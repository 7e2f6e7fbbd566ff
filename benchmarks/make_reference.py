"""A small GPT-2 with its logits, loss, gradients and AdamW losses, computed by PyTorch in float64.

    python benchmarks/make_reference.py FOLDER

writes three files into FOLDER (the defaults give the files beside this one):

    NAME.bin              the model: llm.c's format, version 3 (float32)
    NAME_debug_state.bin  tokens, targets, logits, loss, gradients: llm.c's debug state, version 2, rounded to float32
    NAME.json             the sizes, the loss and the losses of the AdamW steps, for both decay rules, and of the Muon
                          steps, in full precision

Needs PyTorch and NumPy, and nothing of daskgpt: it is an independent reference.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

MATRICES = {"wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw"}
BLOCK_MATRICES = ("qkvw", "attprojw", "fcw", "fcprojw")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="gpt2_small")
    sizes = {"L": 3, "NH": 4, "C": 64, "V": 509, "Vp": 512, "P": 64, "B": 4, "T": 32, "seed": 1, "steps": 10}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def random_parameters(a: argparse.Namespace, random: np.random.Generator) -> dict[str, np.ndarray]:
    """llm.c's 16 tensors. Biases and layernorms are random too, so that no gradient hides behind a zero or a one."""

    def normal(*shape: int, std: float = 0.02) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32) * np.float32(std)

    L, C = a.L, a.C
    parameters = {
        "wte": normal(a.Vp, C, std=0.1),
        "wpe": normal(a.P, C, std=0.05),
        "ln1w": 1 + normal(L, C, std=0.1),
        "ln1b": normal(L, C, std=0.1),
        "qkvw": normal(L, 3 * C, C, std=0.1),
        "qkvb": normal(L, 3 * C),
        "attprojw": normal(L, C, C, std=0.1),
        "attprojb": normal(L, C),
        "ln2w": 1 + normal(L, C, std=0.1),
        "ln2b": normal(L, C, std=0.1),
        "fcw": normal(L, 4 * C, C, std=0.1),
        "fcb": normal(L, 4 * C),
        "fcprojw": normal(L, C, 4 * C, std=0.1),
        "fcprojb": normal(L, C),
        "lnfw": 1 + normal(C, std=0.1),
        "lnfb": normal(C, std=0.1),
    }
    parameters["wte"][a.V :] = 0
    return parameters


def header(*numbers: int) -> bytes:
    values = np.zeros(256, "<i4")
    values[: len(numbers)] = numbers
    return values.tobytes()


def attention(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    T, HS = qkv.shape[1], qkv.shape[2] // 3 // heads
    q, k, v = (part.view(-1, T, heads, HS).transpose(1, 2) for part in qkv.chunk(3, -1))
    scores = (q @ k.transpose(-1, -2)) / HS**0.5
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(-1, T, heads * HS)


def forward(p: dict[str, torch.Tensor], tokens: torch.Tensor, a: argparse.Namespace) -> torch.Tensor:
    x = p["wte"][tokens] + p["wpe"][: tokens.shape[1]]
    for l in range(a.L):
        normed = F.layer_norm(x, (a.C,), p["ln1w"][l], p["ln1b"][l])
        mixed = attention(normed @ p["qkvw"][l].T + p["qkvb"][l], a.NH)
        x = x + mixed @ p["attprojw"][l].T + p["attprojb"][l]
        hidden = F.layer_norm(x, (a.C,), p["ln2w"][l], p["ln2b"][l]) @ p["fcw"][l].T + p["fcb"][l]
        x = x + F.gelu(hidden, approximate="tanh") @ p["fcprojw"][l].T + p["fcprojb"][l]
    return F.layer_norm(x, (a.C,), p["lnfw"], p["lnfb"]) @ p["wte"][: a.V].T


class Reference:
    """The parameters and the batch, and what follows from them."""

    def __init__(self, a: argparse.Namespace) -> None:
        random = np.random.default_rng(a.seed)
        self.a = a
        self.parameters = random_parameters(a, random)
        self.tokens = random.integers(0, a.V, (a.B, a.T))
        self.targets = random.integers(0, a.V, (a.B, a.T))

    def trainable(self) -> dict[str, torch.Tensor]:
        return {
            name: torch.tensor(values, dtype=torch.float64, requires_grad=True)
            for name, values in self.parameters.items()
        }

    def logits_and_loss(self, p: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = forward(p, torch.tensor(self.tokens), self.a)
        return logits, F.cross_entropy(logits.view(-1, self.a.V), torch.tensor(self.targets).view(-1))

    def write_model(self, path: Path) -> None:
        a = self.a
        with path.open("wb") as file:
            file.write(header(20240326, 3, a.P, a.V, a.L, a.NH, a.C, a.Vp))
            for values in self.parameters.values():
                file.write(values.astype("<f4").tobytes())

    def write_debug_state(self, path: Path) -> float:
        p = self.trainable()
        logits, loss = self.logits_and_loss(p)
        loss.backward()
        with path.open("wb") as file:
            file.write(header(20240327, 2, self.a.B, self.a.T))
            file.write(self.tokens.astype("<i4").tobytes() + self.targets.astype("<i4").tobytes())
            file.write(logits.detach().numpy().astype("<f4").tobytes())
            file.write(np.array([loss.item()], "<f4").tobytes())
            for values in p.values():
                file.write(values.grad.numpy().astype("<f4").tobytes())
        return loss.item()

    def adamw_losses(self, decay_all: bool) -> list[float]:
        """Losses before each step. llm.c decays every tensor (train_gpt2.c) or the matrices (train_gpt2.cu, .py)."""
        p = self.trainable()
        groups = [
            {"params": [values], "weight_decay": 0.01 if decay_all or name in MATRICES else 0.0}
            for name, values in p.items()
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
        losses = []
        for _ in range(self.a.steps):
            _, loss = self.logits_and_loss(p)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return losses

    def muon_losses(self) -> list[float]:
        """PyTorch's Muon for the blocks' matrices, queries, keys and values apart, and its AdamW for the rest."""
        p = self.trainable()
        maps = {
            name: [
                torch.nn.Parameter(part.clone())
                for matrix in p[name].detach()
                for part in matrix.chunk(3 if name == "qkvw" else 1)
            ]
            for name in BLOCK_MATRICES
        }
        rest = {name: values for name, values in p.items() if name not in maps}
        groups = [
            {"params": [values], "weight_decay": 0.01 if name in MATRICES else 0.0} for name, values in rest.items()
        ]
        adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
        own = [part for parts in maps.values() for part in parts]
        muon = torch.optim.Muon(own, lr=1e-3, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        losses = []
        for _ in range(self.a.steps):
            whole = {name: torch.cat(parts).view(p[name].shape) for name, parts in maps.items()}
            _, loss = self.logits_and_loss(rest | whole)
            losses.append(loss.item())
            adamw.zero_grad()
            muon.zero_grad()
            loss.backward()
            adamw.step()
            muon.step()
        return losses


def in_float64() -> None:
    """PyTorch's Muon rounds its matrices to bfloat16, by this method: here it keeps their dtype."""
    torch.Tensor.bfloat16 = lambda self, *args, **kwargs: self.clone()


def main() -> None:
    a = arguments()
    torch.set_flush_denormal(True)
    in_float64()
    a.folder.mkdir(parents=True, exist_ok=True)
    reference = Reference(a)
    reference.write_model(a.folder / f"{a.name}.bin")
    loss = reference.write_debug_state(a.folder / f"{a.name}_debug_state.bin")
    sizes = {"max_positions": a.P, "vocabulary": a.V, "padded_vocabulary": a.Vp, "blocks": a.L, "heads": a.NH}
    summary = {
        "config": {**sizes, "channels": a.C, "B": a.B, "T": a.T},
        "loss": loss,
        "adamw": {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
        "losses_decay_all": reference.adamw_losses(decay_all=True),
        "losses_decay_2d": reference.adamw_losses(decay_all=False),
        "muon": {"learning_rate": 1e-3, "beta": 0.95, "scale": 0.2, "weight_decay": 0.01},
        "losses_muon": reference.muon_losses(),
        "made_by": f"PyTorch {torch.__version__}, float64",
    }
    (a.folder / f"{a.name}.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
