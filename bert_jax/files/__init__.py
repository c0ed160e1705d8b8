"""Files that are replaced whole, appended to line by line, or written to a bucket."""
