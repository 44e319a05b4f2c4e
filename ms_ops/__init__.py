"""Everything that touches MindSpore's internals, in one thin layer.

`hyper_parallel` imports from here and never from MindSpore's private modules; when MindSpore changes, this package
changes. Every fact about MindSpore that the code relies on is written down where it is used, with the version it was
seen in, and `tests/ms_ops` fails when it stops being true.
"""
