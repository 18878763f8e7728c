"""Generated code: scripts, calls of ops, the body of a program."""
