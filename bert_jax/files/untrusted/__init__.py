"""Readers of untrusted files. They refuse files beyond the limits that `SECURITY.md` lists."""
