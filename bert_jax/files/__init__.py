"""File access: readers with limits for untrusted files, atomic replacement, leases, and buckets.

`untrusted/` limits bytes, depth and time for each format. The package knows nothing of models. Read
first: untrusted/whole_file.py, staging.py.
"""
