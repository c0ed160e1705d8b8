"""Building of token stores from sources of raw text."""
