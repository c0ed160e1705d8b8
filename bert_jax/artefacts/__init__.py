"""Models in directories: reading (`saved/`), foreign formats (`formats/`), export (`exchange/`).

`exchange/` writes a model in another format and proves that the copy computes the same outputs.
May import distributed, model and data. Read first: saved/model.py, formats/family.py,
exchange/export.py.
"""
