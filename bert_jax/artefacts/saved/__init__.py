"""Models and runs in directories: reading, averaging, and tracing of their ancestors."""
