"""Untrusted files: read within limits, or refused; `SECURITY.md` lists them."""
