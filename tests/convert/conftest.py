"""The tiny BERT of tests/finetune is used here, too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "finetune"))  # huggingface_directory.py
