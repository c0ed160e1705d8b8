"""Multiple choice: the best of several continuations of a text."""
