"""The colours of layers in a timeline: bright forward, dark backward."""

from __future__ import annotations

COLOURS = {
    "linear": "#4269d0",
    "attention": "#ff725c",
    "gelu": "#efb118",
    "layernorm": "#3ca951",
    "add": "#a463f2",
    "crossentropy": "#ff8ab7",
    "embedding": "#9c6b4e",
    "adamw": "#7f8c99",
    "muon": "#5b6770",
    "gather": "#17becf",
    "split": "#97bbf5",
    "mean": "#303030",
}
MESSAGES = {"receive": "#d62728", "send": "#f4a3a3"}  # red, as on Dask's pages
OTHER_COLOUR = "#d0a842"
DARKER = 0.62  # of a forward kernel's colour: its backward kernels


def is_message(layer: str) -> bool:
    """Whether an event of this name sends to another worker, or waits for one."""
    return layer.partition(".")[0] in MESSAGES


def colour_of(layer: str, backward: bool) -> str:
    if is_message(layer):
        return MESSAGES[layer.partition(".")[0]]
    colour = COLOURS.get(layer, OTHER_COLOUR)
    if not backward:
        return colour
    return "#" + "".join(f"{int(int(colour[at : at + 2], 16) * DARKER):02x}" for at in (1, 3, 5))
