"""Policies, regions, replay and swap: what happens to the activations that backward needs."""
