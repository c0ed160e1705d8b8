"""Files: bounded readers of what anyone may have written, whole replacement, leases, buckets.

`untrusted/` bounds bytes, depth and time of each format. Knows no model and no jax.
Read first: untrusted/whole_file.py, staging.py.
"""
