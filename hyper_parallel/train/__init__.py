"""Policies in a training script: a callback for `mindspore.train.Model`, and one that MindFormers loads by its name."""

from hyper_parallel.train.callback import PolicyCallback

__all__ = ["PolicyCallback"]
