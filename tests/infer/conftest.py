"""Where helpers of other tests lie."""

import sys
from pathlib import Path

for name in ("data", "exchange"):  # fast_files.py, family_models.py
    sys.path.insert(0, str(Path(__file__).parents[1] / name))
