"""Start of a run: first weights, what is frozen, the objective, a teacher."""
