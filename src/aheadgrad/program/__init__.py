"""Programs: an FX graph plus a signature of typed slots."""
