"""Figures made with matplotlib without a window system: their style, and writing them to files."""

from pathlib import Path
from typing import Any

from bert_jax.files.staging import staged_file

INK, MARK = "#1a202c", "#4a5568"
"""Colours of text, and of lines that mark a value."""


def new_figure(inches: tuple[float, float], title: str = "") -> Any:
    """Create a matplotlib `Figure` without pyplot, which has global state and may open windows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    if title:  # a $ in a file or class name must not start a formula
        figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left", parse_math=False)
    return figure


def dress(axis: Any, lines: str = "y") -> None:
    """Draw a light grid (`lines`: x, y or both) behind the curves; remove top and right border."""
    axis.grid(axis=lines, color="#edf2f7", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(colors=INK, labelsize=9)


def write_picture(figure: Any, path: Path) -> None:
    """Write a matplotlib `Figure` as a PNG file, which appears only when it is complete."""
    with staged_file(path) as file:
        figure.savefig(file, format="png")
