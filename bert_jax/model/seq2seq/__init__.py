"""Networks that read a source sequence and write a target sequence."""
