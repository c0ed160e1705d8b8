"""From sources of raw text to a token store."""
