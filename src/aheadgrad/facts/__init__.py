"""Facts: what the one recorded run did to its inputs, and what its outputs share memory with."""
