"""`bert-jax`, of which each of several processes keeps what it has compiled.

JAX lets process 0 alone write to the compilation cache, and on CPUs no other process can use what
it wrote: each start of the others would compile again.
"""

import sys
from types import SimpleNamespace

from jax._src import compiler

from bert_jax.cli import main as cli

if __name__ == "__main__":
    compiler.distributed = SimpleNamespace(global_state=SimpleNamespace(process_id=0, client=None))
    sys.exit(cli.main())
