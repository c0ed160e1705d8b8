"""What every run has, whatever it learns: events, metrics, the console, goodput, signals."""
