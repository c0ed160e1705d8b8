"""`python -m bert_jax.cli`: the command line without its script."""

import sys

from bert_jax.cli.main import main

sys.exit(main())
