"""Reports on a model's answers: counts by class, intervals, mistakes, tables, pictures."""
