"""A callback for MindFormers. Its trainers load it from this folder; see `FOLDER`."""

from pathlib import Path

FOLDER = Path(__file__).parent
"""What REGISTER_PATH must be, so that a configuration can name the callback."""
