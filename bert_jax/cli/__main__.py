"""Entry point of `python -m bert_jax.cli`, which works without the script `bert-jax`."""

import sys

from bert_jax.cli.main import main

sys.exit(main())
