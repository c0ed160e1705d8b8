"""Models in directories, whoever wrote them."""
