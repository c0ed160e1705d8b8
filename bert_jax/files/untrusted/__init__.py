"""Readers that refuse untrusted files beyond their limits, which `SECURITY.md` lists."""
