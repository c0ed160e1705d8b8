"""Export of translation models: files, search programs, and their proof."""
