"""A model in somebody's files, checked and not yet read: what every format's reader gives, and every writer takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from daskgpt.config.model import GPT2Config
from daskgpt.formats.published import in_memory
from daskgpt.formats.shown_models import model_html, model_text
from daskgpt.model.parameters import Tensor, tensors


@dataclass(frozen=True, eq=False)
class OpenedModel:
    """A model whose files are mapped. All that can be said without its values has been checked.

    files             that it is in
    kind              the format's name, for people
    dtype             of the values in the files, for people
    read              gives a tensor of the table as float32 in the tensor's shape, which says how many rows of padding
                      there are; perhaps a view of the files, read-only and not contiguous
    encoding          between text and token ids, "" where the files do not say
    sequence_length   of the sequences it was trained on, 0 where the files do not say [tokens]
    """

    config: GPT2Config
    files: list[Path]
    kind: str
    dtype: str
    read: Callable[[Tensor], np.ndarray]
    encoding: str = ""
    sequence_length: int = 0

    def __repr__(self) -> str:
        return model_text("OpenedModel", self)

    def _repr_html_(self) -> str:
        return model_html("OpenedModel", self)

    def parameters(self) -> dict[str, np.ndarray]:
        """All tensors by name.

        Shapes   those of parameter_shapes
        Dtype    float32, each in memory of its own
        Cost     the parameters, and the largest tensor once more
        """
        return {name: in_memory(self.read(tensor)) for name, tensor in tensors(self.config).items()}


class ReadLater(Mapping[str, np.ndarray]):
    """Tensors that are somewhere else, each read when it is asked for.

    names   of them, in the order of the mapping
    read    gives a tensor by its name, float32 in the shape that the model's table says
    """

    def __init__(self, names: Iterable[str], read: Callable[[str], np.ndarray]) -> None:
        self.names, self.read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> np.ndarray:
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names  # and nothing is read for that

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
