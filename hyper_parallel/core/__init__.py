"""What the public names of `hyper_parallel` are made of."""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)  # see hyper_parallel/_beside.py
