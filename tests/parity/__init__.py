"""Counterparts of the tests of torch's own AOTAutograd; `docs/parity.md` says which is which."""
