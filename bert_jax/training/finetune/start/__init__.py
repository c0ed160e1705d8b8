"""Start of a run: first weights, frozen parts, the objective, a teacher."""
