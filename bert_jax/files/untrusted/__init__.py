"""Readers of untrusted files. They reject files that exceed the limits in `SECURITY.md`."""
