"""What makes small files in other directories of tests is used here, too."""

import sys
from pathlib import Path

for name in ("finetune", "data", "convert", "training"):
    sys.path.insert(0, str(Path(__file__).parents[1] / name))
