"""Random choices that a test must know afterwards."""

import random
from typing import Any


class Noted:
    """Draws of `random.Random`; `names` has those choices that are names of tensors."""

    def __init__(self, seed: int) -> None:
        self.random, self.names = random.Random(seed), list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.random, name)

    def choice(self, options: Any) -> Any:
        """A choice, noted if it is a name with a point."""
        chosen = self.random.choice(options)
        if isinstance(chosen, str) and "." in chosen:
            self.names.append(chosen)
        return chosen
