"""Search over texts by their vectors: an index of files, hard negatives, scores on test sets."""
