"""File access: readers with limits for untrusted files, atomic replacement, leases, and buckets.

The package does not depend on models. Read first: untrusted/whole_file.py, staging.py.
"""
