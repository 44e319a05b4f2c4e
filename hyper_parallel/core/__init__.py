"""What the public names of `hyper_parallel` are made of."""
