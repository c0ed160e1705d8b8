"""What a run begins with: weights, what is frozen, its objective, a teacher."""
