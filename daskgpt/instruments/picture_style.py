"""How every picture looks that matplotlib draws here."""

STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "svg.hashsalt": "daskgpt",
    "figure.constrained_layout.use": True,
}
