"""Models in directories: reading (`saved/`), foreign formats (`formats/`), export (`exchange/`).

`exchange/` exports models and proves that each copy computes the same outputs. May import
distributed, model and data. Read first: saved/model.py, formats/family.py, exchange/export.py.
"""
