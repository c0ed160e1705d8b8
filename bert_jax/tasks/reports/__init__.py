"""Reports on a model's predictions: counts by class, intervals, mistakes, tables, plots."""
