"""A model in files, whose tensors may be read later, as every format's reader returns it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from daskgpt.config.model import GPT2Config
from daskgpt.formats.layouts import in_memory
from daskgpt.model.parameters import check_dtypes, check_parameters


class ReadLater(Mapping[str, np.ndarray]):
    """Tensors that are read each time they are looked up.

    names   names in the order of the mapping
    read    returns a tensor by its name, float32 in the shape of the model's table
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


@dataclass(frozen=True, eq=False)
class StoredModel:
    """A model in files. Everything that can be checked without the values has been checked.

    parameters        by name, float32; a reader's are read when they are looked up, and may be views of the files,
                      read-only and not contiguous
    encoding          between text and token ids, "" if the files name none
    sequence_length   length of the sequences it was trained on, 0 if unknown [tokens]
    kind, dtype       names of the format and of the dtype in the files
    files             paths of the files
    """

    config: GPT2Config
    parameters: Mapping[str, np.ndarray] = field(repr=False)
    encoding: str = ""
    sequence_length: int = 0
    kind: str = ""
    dtype: str = ""
    files: tuple[Path, ...] = ()

    def loaded(self) -> StoredModel:
        """Return the model with all tensors in memory of their own, contiguous and writable."""
        return replace(self, parameters={name: in_memory(values) for name, values in self.parameters.items()})

    def check(self, where: str) -> None:
        """Check names, shapes and dtypes of parameters that are in memory.

        Errors   ValueError, TypeError
        """
        if not isinstance(self.parameters, ReadLater):
            check_parameters(self.config, self.parameters)
            check_dtypes(where, self.parameters, np.float32)
