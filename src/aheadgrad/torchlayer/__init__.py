"""The one door to private torch.

Every underscore API of torch that aheadgrad relies on is used in this package only, one small
file per topic. The rest of aheadgrad imports plain names from here, so a new torch release is
a matter of reading these files. `tests/test_torchlayer.py` checks each symbol.
"""
