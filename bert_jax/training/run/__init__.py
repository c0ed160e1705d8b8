"""Parts that every run has: events, metrics, console output, goodput, watchdog and signals."""
