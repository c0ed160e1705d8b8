"""Search of texts by vectors: an index of files, hard negatives, and scores on test sets."""
