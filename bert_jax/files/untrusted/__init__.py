"""Files from elsewhere: read within bounds, or refused; `SECURITY.md` lists them."""
