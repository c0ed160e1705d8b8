"""The compile cache of tests/training is used here, too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))  # small_run.py
