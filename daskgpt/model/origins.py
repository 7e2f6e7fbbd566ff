"""Where in the model a task comes from: instruments, grouping and memory read it instead of the names of keys."""

from __future__ import annotations

from dataclasses import dataclass

PHASES = ("forward", "backward", "update")


@dataclass(frozen=True, slots=True)
class Origin:
    """The call that a task, or a part of one, belongs to.

    layer      name of the layer's row, or of the optimizer
    phase      one of PHASES
    where      in the model, by GPT-2's published names: `h.0.attn.c_attn`
    block      number of the transformer block, None outside of them
    argument   in backward: the argument whose gradient it is
    parameter  the tensor that an update writes
    again      whether forward's result is computed again in backward
    """

    layer: str
    phase: str
    where: str
    block: int | None = None
    argument: str = ""
    parameter: str = ""
    again: bool = False

    @property
    def kind(self) -> str:
        """Layer and pass, as keys begin: `linear.forward`, `adamw`."""
        return self.layer if self.phase == "update" else f"{self.layer}.{self.phase}"

    @property
    def place(self) -> str:
        """Where, with what tells the calls of one layer's backward pass apart."""
        return ".".join(filter(None, (self.where, "again" if self.again else self.argument)))

    @property
    def stage(self) -> str:
        """The loop of a fork-join program that it belongs to: a layer's forward, a layer's backward, or the update.

        The gradients of one layer belong together; what is computed again comes before them.
        """
        if self.phase == "update":
            return self.phase
        return f"{self.kind} {self.where}{' again' if self.again else ''}"

    def name(self, token: str) -> str:
        """The first part of the keys: Dask's dashboard colours and groups by what stands before the first dash.

        It takes a part of letters alone after a dash for more of the name; hence the underscore.
        """
        return f"{self.kind}-{self.place}_-{token}"
