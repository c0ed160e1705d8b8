"""Export of adapters: the low-rank updates and the head of a run, without the encoder."""
