"""Policies in compiled nets: flags that MindSpore's compiler reads, and the compiled graph as proof."""
