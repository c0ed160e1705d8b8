"""Foreign checkpoint formats: names of parameters, fields and layouts."""
