"""What a pretraining run starts from in place of random parameters."""
