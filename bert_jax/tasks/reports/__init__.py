"""Reports on the answers of a model: counts by class, intervals, mistakes, tables, pictures."""
