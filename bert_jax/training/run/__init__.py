"""Parts that every run has: lease, events, metrics, console, goodput, signals."""
