"""What a run learns."""
