"""aheadgrad side by side with eager PyTorch and with torch's own AOTAutograd.

    python -m benchmarks                # all of them
    python -m benchmarks step saved     # some of them

Each module here is one benchmark: `run()` returns rows, a row may carry bars, and a bar that does
not hold makes the command exit with status 1. The contenders of a row take turns in one process,
so that a noisy machine disturbs all of them alike; what is reported is the median over the turns.
"""
