"""Cost of a compiled program: operations, bytes and cycles."""
