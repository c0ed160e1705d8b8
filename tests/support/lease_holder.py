"""A process that holds a work directory and adds a line to a file there every few moments.

Usage: python lease_holder.py DIRECTORY MACHINE LAPSE PATIENCE
MACHINE: the name of the machine that the process is to be on; "": this one.
"""

import os
import signal
import sys
import time

from bert_jax.errors import UserError
from bert_jax.files import lease
from bert_jax.training.run.session import hold_workdir

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
directory, machine, lapse, patience = sys.argv[1:]
if machine:
    lease.machine = lambda: machine
times = lease.Times(beat=0.1, lapse=float(lapse), patience=float(patience), poll=0.02)
try:
    with hold_workdir(directory, times=times) as place:
        print("held", flush=True)
        while True:
            place.sync()
            with open(place.local / "lines", "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(0.05)
except UserError as error:
    print(error, flush=True)
    sys.exit(2)
