"""Models out of and into other formats, with proof."""
