"""Generated programs against eager, and what they have found."""
