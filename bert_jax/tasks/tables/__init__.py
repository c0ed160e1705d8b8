"""Columns of tables: CSV, TSV, JSON lines, parquet, TensorFlow Datasets."""
