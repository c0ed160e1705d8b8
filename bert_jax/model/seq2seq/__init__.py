"""Networks that read a source sequence and generate a target sequence."""
