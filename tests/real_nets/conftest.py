"""Swap that really moves the small tensors of small nets, and the state that every test must leave."""

from tests.exactness.conftest import everything_is_swapped as everything_is_swapped
