"""Reading of models from directories, whichever program wrote them."""
