"""The loss curve of a run as lines of text, beside the unigram entropy of its corpus."""

from collections.abc import Sequence

import numpy as np

Points = Sequence[tuple[float, float]]

_HEIGHT = 16
_LEAST_WIDTH = 40
_TO_ASCII = str.maketrans("─┈│┊┌┐└┘├┤┬┴┼", "--||+++++++++")


def terminal_curve(
    train: Points, heldout: Points, baseline: float | None, *, width: int, plain: bool
) -> list[str]:
    """Draw the losses as lines of text.

    Args:
        train: (step, nats) in ascending order.
        heldout: The same of held-out text.
        baseline: Unigram entropy, nats; None where it is not known.
        width: Columns, at most.
        plain: ASCII without colours, for a file or a pipe.

    Returns:
        Nothing where there is no point to draw.
    """
    import plotext

    values = np.array([y for _, y in [*train, *heldout]])
    if not len(values):
        return []
    end = max(1.0, *(x for x, _ in [*train, *heldout]))
    marks = [] if baseline is None else [baseline]
    low, high = min([*marks, values.min()]), max([*marks, np.quantile(values, 0.99)])
    margin = 0.08 * max(high - low, 0.5)
    low, high = low - margin, high + margin  # the fall of the first steps may leave the picture

    figure = plotext.figure  # there is one
    figure.clear()
    try:
        plotext.terminal.limit(False, False)
        figure.theme("colorless")
        figure.canvas("default")
        figure.plot_size(max(_LEAST_WIDTH, width), _HEIGHT)
        figure.legend(False)
        figure.axes(False, side=1)
        if baseline is not None:
            line = figure.signal([0, end], [baseline] * 2, marker=plotext.marker("-", "gray"))
            figure.draw(line.lines(True))
        curve = figure.signal(
            *_columns(train), marker=plotext.marker("*" if plain else "braille", "blue")
        )
        figure.draw(curve.lines(True))
        if heldout:
            figure.draw(figure.signal(*_columns(heldout), marker=plotext.marker("o", "orange")))
        figure.ruler("x").lim(0, end)
        figure.ruler("y").lim(low, high)
        steps = sorted({round(end * i / 4) for i in range(5)})
        figure.ruler("x").ticks(steps, [f"{step:,}" for step in steps])
        losses = [float(loss) for loss in np.linspace(low + margin, high - margin, 4)]
        figure.ruler("y").ticks(losses, [f"{loss:.2f}" for loss in losses])
        text = figure.build().string(colorless=plain)
    finally:
        figure.clear()
    return [line.rstrip() for line in (text.translate(_TO_ASCII) if plain else text).splitlines()]


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
