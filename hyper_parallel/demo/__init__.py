"""The demo: a small GPT on real text, trained once per mode, each time in a fresh process."""
