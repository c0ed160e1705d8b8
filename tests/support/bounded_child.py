"""Running a reader in a process of its own that may not use more than so much memory."""

import subprocess
import sys
import textwrap

_LIMIT = """
import resource
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {extra}, used + {extra}))
from bert_jax.errors import UserError
"""


def run_bounded(code: str, *arguments: object, extra: int, imports: str = "") -> str:
    """What `code` prints; a UserError is printed as "UserError: ...", anything else fails.

    Args:
        code: Python; its arguments are `sys.argv[1:]`.
        arguments: for it.
        extra: bytes of address space that it may use beyond what `imports` left it with.
        imports: run before the limit is set.
    """
    body = textwrap.indent(textwrap.dedent(code), "    ")
    script = (
        f"import sys\n{textwrap.dedent(imports)}\n{_LIMIT.format(extra=extra)}\n"
        f"try:\n{body}\nexcept UserError as error:\n    print('UserError:', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
