"""These tests need an environment of their own (`make test-ecosystem`); elsewhere there are none."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch_geometric") else ["test_*.py"]
